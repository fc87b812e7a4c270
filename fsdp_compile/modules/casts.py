"""Casts where values enter and leave a module: at the modules that a policy was set on, and around those kept whole.

Buffers in another dtype than they were made in: cast once, saved and (if asked) evaluated as they were.

The original values stay beside the cast ones. A buffer that was not written to since comes back exactly; one that was
comes back in its original dtype with the values that training left.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class CastWhen(enum.Enum):
    """In which mode of the module its inputs are cast."""

    ALWAYS = "always"
    TRAINING = "training"
    """Not in eval mode, where parameters are read in their own dtype."""


@dataclasses.dataclass(frozen=True)
class ForwardCasts:
    """What is cast at a module that a policy was set on.

    Attributes:
        inputs: Dtype of floating-point inputs; `None` leaves them.
        output: Dtype of floating-point outputs; `None` leaves them.
        when: In which mode inputs are cast.
    """

    inputs: torch.dtype | None
    output: torch.dtype | None
    when: CastWhen = CastWhen.ALWAYS


@dataclasses.dataclass(frozen=True)
class FullPrecision:
    """A module that computes in its own dtype whatever is around it: outputs get the dtype that its inputs had.

    Attributes:
        dtype: Dtype of its parameters.
    """

    dtype: torch.dtype


def cast_inputs(at: ForwardCasts | FullPrecision, module: nn.Module, arguments: Arguments) -> Arguments:
    """Arguments of `module`, cast as its boundary says."""
    if isinstance(at, FullPrecision):
        return cast(arguments, at.dtype)
    if at.inputs is None or (at.when is CastWhen.TRAINING and not module.training):
        return arguments
    return cast(arguments, at.inputs)


def cast_output(at: ForwardCasts | FullPrecision, arguments: Arguments, output: Any) -> Any:
    """What a module returns, cast as its boundary says.

    Args:
        at: The boundary.
        arguments: What the module was called with, before any cast.
        output: What it returned.
    """
    dtype = _dtype_of(arguments) if isinstance(at, FullPrecision) else at.output
    return output if dtype is None else cast(output, dtype)


def _dtype_of(arguments: Arguments) -> torch.dtype | None:
    args, kwargs = arguments
    return next((t.dtype for t in _tensors((*args, *kwargs.values())) if t.is_floating_point()), None)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(list(value.values()))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in `value` as `dtype`; everything else, and their `requires_grad`, as it is.

    Looks into tuples, lists, dicts and their kin, dataclasses and packed sequences.
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(dtype) if x.is_floating_point() else x
        if isinstance(x, PackedSequence):
            return x.to(dtype) if x.data.is_floating_point() else x
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = {f.name: cast(getattr(x, f.name), dtype) for f in dataclasses.fields(x) if f.init}
            return dataclasses.replace(x, **fields)
        return x

    return tree_map(leaf, value, is_leaf=lambda x: isinstance(x, PackedSequence))


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
