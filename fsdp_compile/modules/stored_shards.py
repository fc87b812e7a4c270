"""Names what a forward did that computes with stored shards, which torch refuses without a word about parameters.

Reads of `self.weight` gather. Code that takes a parameter out of `module._parameters`, or out of a list that was made
before the model was sharded, gets the DTensor that is stored.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from fsdp_compile._torch.tensors import is_about_mixed_dtensors
from fsdp_compile.errors import UnsupportedModelError

_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
INSTEAD = "read it as an attribute of its module in the forward (self.weight, getattr(self, name)): this gathers it"


def refusal_of_shards(error: RuntimeError) -> UnsupportedModelError | None:
    """What to raise in the place of an error of a forward, if it computed with stored shards."""
    if not is_about_mixed_dtensors(error):
        return None
    return UnsupportedModelError(
        "a forward computes with the stored shards of a parameter, which are DTensors",
        where=_line_of(error),
        instead=f"{INSTEAD}; in a model that tensor parallelism has split, where what is gathered is a DTensor, too, "
        "DTensor.from_local() of what is plain, or parameter.to_local()",
    )


def _line_of(error: RuntimeError) -> str:
    # Dynamo runs operators for lines that Python has not reached; its errors say which.
    stack = list(getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__))
    users = [frame for frame in stack if not frame.filename.startswith(_LIBRARIES)]
    frame = (users or stack)[-1]
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}'
