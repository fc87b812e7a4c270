"""Which function of the user's reads a parameter in a forward that is not compiled, and what it calls."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import NamedTuple

import torch

from fsdp_compile._torch.dynamo import stack

_TORCH = Path(torch.__file__).parent
_ON_THE_WAY = (f"{Path(__file__).parents[1]}/", f"{_TORCH}/nn/modules/module.py", f"{_TORCH}/_dynamo/")
"""Files that hand on what a read gives: by `parameters()`, or around a function that Dynamo leaves out."""


class Calls(NamedTuple):
    """What the code of a function, or of one inside of it, calls."""

    has_id: bool = False
    """`id()`, by which it may look for a parameter."""
    writes_lists: bool = False
    """`torch._foreach_*_()`, which write into lists of tensors."""


def calls_of_reader() -> Calls:
    """What the function calls that reads a parameter now, as an attribute or through `parameters()`."""
    readers = (frame.f_code for frame in stack() if not frame.f_code.co_filename.startswith(_ON_THE_WAY))
    reader = next(readers, None)
    return Calls() if reader is None else _calls(reader)


@functools.lru_cache(maxsize=1024)
def _calls(code: types.CodeType) -> Calls:
    names = _names(code)
    return Calls("id" in names, any(name.startswith("_foreach_") and name.endswith("_") for name in names))


def _names(code: types.CodeType) -> set[str]:
    inside = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inside))
