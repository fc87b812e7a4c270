"""Names what a forward did that computes with stored shards, which torch refuses without a word about parameters.

Reads of `self.weight` gather. Code that takes a parameter out of `module._parameters`, or out of a list that was made
before the model was sharded, gets the DTensor that is stored. So does a loss function that adds a penalty over
`parameters()`: it returns a DTensor, and backward computes with plain tensors and the gradient of that.
"""

from __future__ import annotations

import functools
import traceback
from pathlib import Path

import torch

from fsdp_compile._torch.autograd import explain_errors_of_backwards
from fsdp_compile._torch.tensors import is_about_dtensor_gradient, is_about_mixed_dtensors
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


@functools.cache
def explain_backwards() -> None:
    """Makes every backward of the process say so if it computes with the gradient of a DTensor."""
    explain_errors_of_backwards(_refusal_of_losses)


def _refusal_of_losses(error: RuntimeError) -> UnsupportedModelError | None:
    if not is_about_dtensor_gradient(error):
        return None
    return UnsupportedModelError(
        "a backward computes with plain tensors and the gradient of a DTensor, as of a loss to which a penalty over "
        "sharded parameters was added outside of a forward",
        where="backward()",
        instead="loss + penalty.full_tensor(), or compute the penalty in a forward",
    )


def _line_of(error: RuntimeError) -> str:
    # Dynamo runs operators for lines that Python has not reached; its errors say which.
    stack = list(getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__))
    users = [frame for frame in stack if not frame.filename.startswith(_LIBRARIES)]
    frame = (users or stack)[-1]
    return f'File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}'
