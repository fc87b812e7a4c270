"""Buffers of modules that are cast: their dtype in each mode, and in state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_compile.runtime.buffers import CastBuffer
from fsdp_compile.runtime.module_state import ensure_state, state_of


def cast_buffers(module: nn.Module, dtype: torch.dtype, *, restore_in_eval: bool) -> bool:
    """Casts the floating-point buffers of one module, without its children; returns whether it has any."""
    held = {n: b for n, b in module._buffers.items() if b is not None and b.is_floating_point()}
    if held:
        ensure_state(module).cast_buffers = {n: CastBuffer(dtype, b, restore_in_eval) for n, b in held.items()}
        follow_mode(module)
    return bool(held)


def _cast_buffers_of(module: nn.Module) -> dict[str, CastBuffer]:
    state = state_of(module)
    return {} if state is None else state.cast_buffers


def follow_mode(module: nn.Module) -> None:
    """Casts or restores each cast buffer of a module, as its mode asks for."""
    for name, cast in _cast_buffers_of(module).items():
        current = module._buffers.get(name)
        if current is None:
            continue
        if cast.in_eval and not module.training:
            module._buffers[name] = cast.restored(current)
        elif current.dtype != cast.dtype:
            # Its value in full precision now: after a load, a move or a switch from eval mode.
            cast.original = current
            module._buffers[name] = current.to(cast.dtype)


def restore(module: nn.Module) -> None:
    """Restores the dtype of each cast buffer of a module, so that a state dict can be loaded without rounding it."""
    for name, cast in _cast_buffers_of(module).items():
        current = module._buffers.get(name)
        if current is not None:
            module._buffers[name] = cast.restored(current)


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """In the block cast buffers of `model` are in their own dtype, so that values they are given are not rounded."""
    for module in model.modules():
        restore(module)
    try:
        yield
    finally:
        for module in model.modules():
            follow_mode(module)


def in_own_dtype(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """`model.named_buffers()`, with cast buffers in their own dtype."""
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        cast = _cast_buffers_of(model.get_submodule(owner)).get(attribute)
        yield name, buffer if cast is None else cast.restored(buffer)


def save_original(module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Puts the cast buffers of a module into its state dict in their own dtype."""
    for name, cast in _cast_buffers_of(module).items():
        current = module._buffers.get(name)
        if current is not None and prefix + name in destination:
            destination[prefix + name] = cast.restored(current.detach())
