"""Buffers in another dtype than they were made in: cast once, saved and (if asked) evaluated as they were.

The original values stay beside the cast ones. A buffer that was not written to since comes back exactly; one that was
comes back in its original dtype with the values that training left.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

CAST = "_fsdp_cast_buffers"
"""Attribute of a module: name of the buffer to its `CastBuffer`."""


@dataclasses.dataclass
class CastBuffer:
    """One buffer of a module.

    Attributes:
        dtype: What it is cast to.
        original: Its value in its own dtype, when it was cast last.
        in_eval: Whether eval mode sees it in its own dtype.
    """

    dtype: torch.dtype
    original: torch.Tensor
    in_eval: bool

    def restored(self, current: torch.Tensor) -> torch.Tensor:
        """The buffer in its own dtype, given what the module holds now."""
        if current.dtype == self.original.dtype or current.device.type == "meta":
            return current.to(self.original.dtype)
        if self.original.shape == current.shape and self.original.device == current.device:
            untouched = torch.equal(self.original.to(current.dtype), current)
            if untouched:
                return self.original
        return current.to(self.original.dtype)


def cast_buffers(module: nn.Module, dtype: torch.dtype, *, restore_in_eval: bool) -> bool:
    """Casts the floating-point buffers of one module, not of its children.

    Returns:
        Whether it has any.
    """
    held = {n: b for n, b in module._buffers.items() if b is not None and b.is_floating_point()}
    if held:
        object.__setattr__(module, CAST, {n: CastBuffer(dtype, b, restore_in_eval) for n, b in held.items()})
        follow_mode(module)
    return bool(held)


def follow_mode(module: nn.Module) -> None:
    """Gives each cast buffer of a module the dtype that belongs to the module's mode."""
    for name, cast in module.__dict__.get(CAST, {}).items():
        current = module._buffers.get(name)
        if current is None:
            continue
        if cast.in_eval and not module.training:
            module._buffers[name] = cast.restored(current)
        elif current.dtype != cast.dtype:
            cast.original = current
            module._buffers[name] = current.to(cast.dtype)


def restore(module: nn.Module) -> None:
    """Gives each cast buffer of a module its own dtype, so that a state dict can be loaded without rounding it."""
    for name, cast in module.__dict__.get(CAST, {}).items():
        current = module._buffers.get(name)
        if current is not None:
            module._buffers[name] = cast.restored(current)


def save_original(module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Puts cast buffers of a module that was just saved into a state dict in their own dtype."""
    for name, cast in module.__dict__.get(CAST, {}).items():
        current = module._buffers.get(name)
        if current is not None and prefix + name in destination:
            destination[prefix + name] = cast.restored(current.detach())
