"""`backward(inputs=...)` and `autograd.grad()` of sharded parameters: refused by name, where autograd says nothing.

Autograd ends at flat parameters, and the sharded ones are views that no graph has read. Asked for their gradients,
`backward()` would do nothing at all, and `autograd.grad()` would say that they were not used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch.distributed.tensor import DTensor

from fsdp_compile._torch.autograd import before_each_backward
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.runtime.units import sharded_parameters


@functools.cache
def follow_backwards() -> None:
    """Makes every backward of the process that asks for some gradients alone check of what."""
    before_each_backward(refuse)


def refuse(inputs: Sequence[object]) -> None:
    """Raises `UnsupportedModelError` if gradients of a sharded parameter are asked for by name."""
    asked = [value for value in inputs if isinstance(value, DTensor)]
    sharded = sharded_parameters() if asked else {}
    for parameter in asked:
        if parameter in sharded:
            raise UnsupportedModelError(
                "the gradients of some sharded parameters alone are asked for, and autograd knows only the flat "
                "parameters that they are views of",
                where=f"backward(inputs=...) or torch.autograd.grad(), parameter {sharded[parameter].name}",
                instead="loss.backward(), and p.grad = None for the others after it, or requires_grad_(False) before "
                "the forward",
            )
