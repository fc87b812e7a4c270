"""Buffers that mixed precision casts: in state dicts, and in eval mode where that is asked for, as they were before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype, *, restore_in_eval: bool) -> None:
    """Casts the floating-point buffers of modules, one by one; state dicts have them in their original dtype."""
    casts: dict[torch.Tensor, torch.Tensor] = {}  # several modules may have one buffer
    for module in modules:
        originals = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and buffer.dtype != dtype
        }
        for name, buffer in originals.items():
            module._buffers[name] = casts.setdefault(buffer, buffer.to(dtype))
        if originals:
            its = {name: casts[buffer] for name, buffer in originals.items()}
            module.register_state_dict_post_hook(_Originals(originals, its, dtype, restore_in_eval=restore_in_eval))
            follow_mode(module)


def follow_mode(module: nn.Module) -> None:
    """Restores the buffers of one module in eval mode, and casts them again in training, if that was asked for."""
    for hook in _hooks_of(module):
        hook.follow_mode(module)


def full_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model.named_buffers()`, with those that were cast as they are in their original dtype."""
    return {name: _full(model, name, buffer) for name, buffer in model.named_buffers()}


@torch.no_grad()
def write_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Writes a value in the original dtype to a buffer; one that was cast keeps it for state dicts."""
    model.get_buffer(name).copy_(value)
    for hook, attribute in _casts_of(model, name):
        hook.keep(attribute, model.get_buffer(name), value)


def _full(model: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
    return next((hook.full(attribute, buffer) for hook, attribute in _casts_of(model, name)), buffer)


def _casts_of(model: nn.Module, name: str) -> list[tuple[_Originals, str]]:
    """What has the original of a buffer that was cast, in each module that has it; none of other buffers."""
    found, buffer = [], model.get_buffer(name)
    for module in model.modules():
        hooks = _hooks_of(module)
        found += [(h, n) for h in hooks for n, each in module._buffers.items() if each is buffer and h.has(n)]
    return found


def _hooks_of(module: nn.Module) -> list[_Originals]:
    return [hook for hook in module._state_dict_hooks.values() if isinstance(hook, _Originals)]


class _Originals:
    """A hook that puts buffers into state dicts as they were before the cast, or if they changed since, cast back."""

    def __init__(
        self,
        originals: dict[str, torch.Tensor],
        casts: dict[str, torch.Tensor],
        dtype: torch.dtype,
        *,
        restore_in_eval: bool,
    ) -> None:
        self._originals = originals
        self._casts = {name: (cast, cast._version) for name, cast in casts.items()}
        self._dtype = dtype
        self._restores = restore_in_eval

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name in self._originals:
            buffer = module._buffers.get(name)
            if buffer is not None and prefix + name in state:
                state[prefix + name] = self.full(name, buffer)

    def follow_mode(self, module: nn.Module) -> None:
        """Restores the buffers of its module in eval mode, and casts them again in training."""
        for name in self._originals if self._restores else ():
            buffer = module._buffers.get(name)
            if buffer is None or (buffer.dtype == self._dtype) is module.training:
                continue
            if module.training:
                module._buffers[name] = buffer.to(self._dtype)
                self.keep(name, module._buffers[name], buffer)
            else:
                module._buffers[name] = self.full(name, buffer)

    def has(self, name: str) -> bool:
        """Whether it knows a buffer."""
        return name in self._originals

    def full(self, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer in its original dtype; the same tensor until it changes."""
        cast, version = self._casts[name]
        if buffer is not cast or cast._version != version:
            self.keep(name, buffer, buffer.to(self._originals[name].dtype))
        return self._originals[name]

    def keep(self, name: str, buffer: torch.Tensor, value: torch.Tensor) -> None:
        """Takes a value in the original dtype for a buffer that was given the same, cast."""
        self._originals[name] = value.detach().clone()
        self._casts[name] = buffer, buffer._version
