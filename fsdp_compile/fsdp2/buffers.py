"""Buffers that a policy has cast: what they were, for state dicts, loads, and compiled forwards in eval mode."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

CASTS = "_fsdp_cast_buffers"
"""Attribute of a module: by name, what is known of its buffers that were cast."""


class CastBuffer:
    """A buffer in two dtypes. What is written to one is written to the other when it is next asked for.

    Attributes:
        original: In its own dtype.
        cast: In the dtype of the policy, which modules have registered.
        in_eval: Whether graphs read the original in eval mode.
        read_in_eval: All of which they do.
    """

    read_in_eval: ClassVar[weakref.WeakSet[CastBuffer]] = weakref.WeakSet()

    def __init__(self, original: torch.Tensor, dtype: torch.dtype, *, in_eval: bool) -> None:
        self.original, self.cast, self.in_eval = original, original.to(dtype), in_eval
        self._versions = self.original._version, self.cast._version
        if in_eval:
            self.read_in_eval.add(self)

    @torch.no_grad()
    def follow(self) -> None:
        """Writes what was written to one of both to the other."""
        original, cast = self._versions
        if self.cast._version != cast:
            self.original.copy_(self.cast)
        elif self.original._version != original:
            self.cast.copy_(self.original)
        self._versions = self.original._version, self.cast._version

    @classmethod
    def follow_all(cls) -> None:
        """`follow` of all that graphs may read in eval mode."""
        for each in tuple(cls.read_in_eval):
            each.follow()


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype, *, in_eval: bool) -> None:
    """Casts the floating-point buffers of modules, but not of those below them, to the dtype that these register then.

    Several modules may have one. With `in_eval`, compiled forwards in eval mode read what the buffers were before.
    """
    made: dict[torch.Tensor, CastBuffer] = {}
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                made[buffer] = made.get(buffer) or CastBuffer(buffer, dtype, in_eval=in_eval)
                _register(module, name, made[buffer])


def originals_in_eval(module: nn.Module) -> list[str]:
    """The names of a module's buffers of which graphs read the originals in eval mode."""
    return sorted(name for name, cast in _casts(module).items() if cast.in_eval)


@contextlib.contextmanager
def in_own_dtype(model: nn.Module) -> Iterator[None]:
    """Registers buffers that were cast in their own dtype, and casts what is registered at the end once more."""
    restored = {module: _restore(module) for module in model.modules()}
    made: dict[torch.Tensor, CastBuffer] = {}
    try:
        yield
    finally:
        for module, names in restored.items():
            _cast_again(module, names, made)


def _casts(module: nn.Module) -> dict[str, CastBuffer]:
    return module.__dict__.get(CASTS, {})


def _register(module: nn.Module, name: str, cast: CastBuffer) -> None:
    if CASTS not in module.__dict__:
        object.__setattr__(module, CASTS, {})
        module.register_state_dict_post_hook(_save_originals)
        module.register_load_state_dict_pre_hook(lambda module, *_: _restore(module))
        module.register_load_state_dict_post_hook(lambda module, _: _cast_again(module, _casts(module), {}))
    module.__dict__[CASTS][name] = cast
    module._buffers[name] = cast.cast


def _save_originals(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, cast in _casts(module).items():
        if module._buffers.get(name) is cast.cast and prefix + name in state:
            cast.follow()
            state[prefix + name] = cast.original


def _restore(module: nn.Module) -> list[str]:
    """Registers what was cast in its own dtype, and returns the names; none of what was replaced since."""
    names = [name for name, cast in _casts(module).items() if module._buffers.get(name) is cast.cast]
    for name in names:
        cast = _casts(module)[name]
        cast.follow()
        module._buffers[name] = cast.original
    return names


def _cast_again(module: nn.Module, names: Iterable[str], made: dict[torch.Tensor, CastBuffer]) -> None:
    for name in names:
        cast, buffer = _casts(module)[name], module._buffers.get(name)
        if buffer is None or buffer is cast.cast:
            continue
        if buffer is not cast.original or buffer.device != cast.cast.device:
            cast = made[buffer] = made.get(buffer) or CastBuffer(buffer, cast.cast.dtype, in_eval=cast.in_eval)
        cast.follow()
        _register(module, name, cast)
