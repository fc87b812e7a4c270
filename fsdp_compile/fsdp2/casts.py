"""Casts of inputs and outputs: at modules with a policy, and around those that are excluded from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from fsdp_compile.config.casts import CastWhen, ForwardCasts, FullPrecision

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def input_dtype(at: ForwardCasts | FullPrecision, module: nn.Module) -> torch.dtype | None:
    """The dtype that floating-point inputs of `module` are cast to; `None` where they stay as they are."""
    if isinstance(at, FullPrecision):
        return at.dtype
    return None if at.when is CastWhen.TRAINING and not module.training else at.inputs


def cast_inputs(at: ForwardCasts | FullPrecision, module: nn.Module, arguments: Arguments) -> Arguments:
    """The arguments of `module`, cast."""
    dtype = input_dtype(at, module)
    return arguments if dtype is None else cast(arguments, dtype)


def changes_inputs(at: ForwardCasts | FullPrecision, module: nn.Module, arguments: Arguments) -> bool:
    """Whether `cast_inputs` would make other tensors of these arguments."""
    dtype = input_dtype(at, module)
    args, kwargs = arguments
    tensors = _tensors((*args, *kwargs.values()))
    return dtype is not None and any(t.is_floating_point() and t.dtype != dtype for t in tensors)


def cast_output(at: ForwardCasts | FullPrecision, arguments: Arguments, output: Any) -> Any:
    """The output of a module, cast; `arguments` are its inputs before any cast."""
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
    """Floating-point tensors in `value` as `dtype`, through containers, dataclasses and packed sequences."""

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
