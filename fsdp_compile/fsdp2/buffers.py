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
        self.__setstate__((original, original.to(dtype), in_eval))

    def __getstate__(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        self.follow()
        return self.original, self.cast, self.in_eval

    def __setstate__(self, state: tuple[torch.Tensor, torch.Tensor, bool]) -> None:
        self.original, self.cast, self.in_eval = state
        self._versions = self.original._version, self.cast._version  # those of copies begin anew
        if self.in_eval:
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

    @torch.no_grad()
    def cast_again(self) -> None:
        """Writes the original, which was registered, to the other; collectives write without a new version."""
        self.cast.copy_(self.original)
        self._versions = self.original._version, self.cast._version

    @classmethod
    def follow_all(cls) -> None:
        """`follow` of all that graphs may read in eval mode."""
        for each in tuple(cls.read_in_eval):
            each.follow()


def cast_buffers(modules: Iterable[nn.Module], dtype: torch.dtype, *, in_eval: bool) -> None:
    """Casts the floating-point buffers of modules, one by one; several modules may have one.

    Args:
        modules: Without what is below them.
        dtype: The registered one, from now on.
        in_eval: Whether compiled forwards in eval mode read what the buffers were before.
    """
    made: dict[torch.Tensor, CastBuffer] = {}
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                if buffer not in made:
                    made[buffer] = CastBuffer(buffer, dtype, in_eval=in_eval)
                _register(module, name, made[buffer])


def originals_in_eval(module: nn.Module) -> list[str]:
    """The names of a module's buffers of which graphs read the originals in eval mode."""
    return sorted(name for name, cast in _casts(module).items() if cast.in_eval)


def full_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """`model.named_buffers()`, with those that were cast in their own dtype."""
    return {name: _full(*_place(model, name), buffer) for name, buffer in model.named_buffers()}


@torch.no_grad()
def write_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Writes a value in its own dtype to a buffer."""
    module, attribute = _place(model, name)
    buffer = model.get_buffer(name)
    _full(module, attribute, buffer).copy_(value)
    cast = _casts(module).get(attribute)
    if cast is not None and cast.cast is buffer:
        cast.follow()


@contextlib.contextmanager
def in_own_dtype(model: nn.Module) -> Iterator[None]:
    """Registers buffers that were cast in their own dtype, and casts what is registered at the end once more."""
    modules = [module for module in model.modules() if _casts(module)]
    for module in modules:
        _restore(module)
    made: dict[torch.Tensor, CastBuffer] = {}
    try:
        yield
    finally:
        for module in modules:
            _cast_again(module, made)


def _casts(module: nn.Module) -> dict[str, CastBuffer]:
    return module.__dict__.get(CASTS, {})


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _register(module: nn.Module, name: str, cast: CastBuffer) -> None:
    if CASTS not in module.__dict__:
        object.__setattr__(module, CASTS, {})
        module.register_state_dict_post_hook(_save_originals)
        module.register_load_state_dict_pre_hook(lambda module, *_: _restore(module))
        module.register_load_state_dict_post_hook(lambda module, _: _cast_again(module, {}))
    module.__dict__[CASTS][name] = cast
    module._buffers[name] = cast.cast


def _full(module: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
    cast = _casts(module).get(name)
    if cast is None:
        return buffer
    if cast.cast is not buffer:  # replaced since
        return buffer.to(cast.original.dtype)
    cast.follow()
    return cast.original


def _save_originals(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name in _casts(module):
        buffer = module._buffers.get(name)
        if buffer is not None and prefix + name in state:
            state[prefix + name] = _full(module, name, buffer)


def _restore(module: nn.Module) -> None:
    for name, cast in _casts(module).items():
        if module._buffers.get(name) is cast.cast:
            cast.follow()
            module._buffers[name] = cast.original


def _cast_again(module: nn.Module, made: dict[torch.Tensor, CastBuffer]) -> None:
    for name, cast in _casts(module).items():
        buffer = module._buffers.get(name)
        if buffer is None or buffer is cast.cast:
            continue
        if buffer is cast.original and buffer.device == cast.cast.device:
            cast.cast_again()
            made[buffer] = cast
        elif buffer not in made:
            made[buffer] = CastBuffer(buffer, cast.cast.dtype, in_eval=cast.in_eval)
        _register(module, name, made[buffer])
