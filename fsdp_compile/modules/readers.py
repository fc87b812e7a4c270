"""Which function of the user's reads a parameter in a forward that is not compiled, and whether it calls `id()`."""

from __future__ import annotations

import functools
import types
from pathlib import Path

import torch

from fsdp_compile._torch.dynamo import stack

_TORCH = Path(torch.__file__).parent
_ON_THE_WAY = (f"{Path(__file__).parents[1]}/", f"{_TORCH}/nn/modules/module.py", f"{_TORCH}/_dynamo/")
"""Files that hand on what a read gives: by `parameters()`, or around a function that Dynamo leaves out."""


def reader_calls_id() -> bool:
    """Whether the function that reads a parameter now, as an attribute or through `parameters()`, calls `id()`."""
    readers = (frame.f_code for frame in stack() if not frame.f_code.co_filename.startswith(_ON_THE_WAY))
    reader = next(readers, None)
    return reader is not None and _calls_id(reader)


@functools.lru_cache(maxsize=1024)
def _calls_id(code: types.CodeType) -> bool:
    """Whether `id` is among the names of a function, or of one inside of it."""
    inside = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return "id" in code.co_names or any(map(_calls_id, inside))
