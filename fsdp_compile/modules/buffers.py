"""Buffers of modules that are cast: which dtype they have in which mode, and in state dicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_compile.runtime.buffers import CastBuffer
from fsdp_compile.runtime.module_state import ensure_state, state_of


def cast_buffers(module: nn.Module, dtype: torch.dtype, *, restore_in_eval: bool) -> bool:
    """Casts the floating-point buffers of one module, not of its children.

    Returns:
        Whether it has any.
    """
    held = {n: b for n, b in module._buffers.items() if b is not None and b.is_floating_point()}
    if held:
        ensure_state(module).cast_buffers = {n: CastBuffer(dtype, b, restore_in_eval) for n, b in held.items()}
        follow_mode(module)
    return bool(held)


def _cast_buffers_of(module: nn.Module) -> dict[str, CastBuffer]:
    state = state_of(module)
    return {} if state is None else state.cast_buffers


def follow_mode(module: nn.Module) -> None:
    """Gives each cast buffer of a module the dtype that belongs to the module's mode."""
    for name, cast in _cast_buffers_of(module).items():
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
    for name, cast in _cast_buffers_of(module).items():
        current = module._buffers.get(name)
        if current is not None:
            module._buffers[name] = cast.restored(current)


def save_original(module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Puts cast buffers of a module that was just saved into a state dict in their own dtype."""
    for name, cast in _cast_buffers_of(module).items():
        current = module._buffers.get(name)
        if current is not None and prefix + name in destination:
            destination[prefix + name] = cast.restored(current.detach())
