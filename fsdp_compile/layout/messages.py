"""From an all-gather's message to a full parameter, and from a full gradient to a reduction's message.

Each function is written once, over a `Builder`: eager reads run it on tensors, the passes run it on graph nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.layout.spec import UnshardSpec

T = TypeVar("T")
aten = torch.ops.aten


class Builder(Protocol, Generic[T]):
    """Runs or records operators."""

    def call(self, op: OpOverload, *args: Any, **kwargs: Any) -> T:
        """Applies `op`."""
        ...

    def value(self, x: T) -> torch.Tensor:
        """The tensor behind `x` (fake, for graph nodes): its shape, strides and dtype are read."""
        ...


class EagerBuilder:
    """Runs operators on tensors at once."""

    def call(self, op: OpOverload, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Applies `op` to tensors."""
        return op(*args, **kwargs)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return x


EAGER = EagerBuilder()


def view(b: Builder[T], x: T, shape: Sequence[int]) -> T:
    """`x` with another shape: a view where its strides allow one, else a contiguous copy."""
    value = b.value(x)
    if tuple(value.shape) == tuple(shape):
        return x
    if not value.is_contiguous():
        x = b.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    return b.call(aten.view.default, x, list(shape))


def cast(b: Builder[T], x: T, dtype: torch.dtype) -> T:
    """`x` in `dtype`; `x` itself if it has that dtype."""
    if b.value(x).dtype == dtype:
        return x
    return b.call(torch.ops.prims.convert_element_type.default, x, dtype)


def narrow(b: Builder[T], x: T, dim: int, start: int, stop: int) -> T:
    """`x[start:stop]` along `dim`; `x` itself if that is all of it."""
    if start == 0 and stop == b.value(x).shape[dim]:
        return x
    return b.call(aten.slice.Tensor, x, dim, start, stop)


def pad_end(b: Builder[T], x: T, dim: int, amount: int) -> T:
    """`x` with `amount` zeros after its last element along `dim`."""
    if amount == 0:
        return x
    after = b.value(x).dim() - 1 - dim
    return b.call(aten.constant_pad_nd.default, x, [0, 0] * after + [0, amount])


def full_parameter(b: Builder[T], gathered: T, spec: UnshardSpec, *, start: int, span: int) -> T:
    """The full parameter out of the message of an all-gather.

    `gathered` has `[size * span]` elements, rank after rank, in the dtype of the result. In each rank's span the
    parameter starts at `start`.

    Returns:
        A tensor of `spec.shape`, its dimensions in memory in `spec.order` (then always a copy); a view of `gathered`
        where the parameter is alone in its message and needs no padding between ranks, else a copy (which Inductor
        fuses into pointwise readers).
    """
    if spec.dim is None:  # every rank sent the same value: take the first rank's
        return view(b, narrow(b, gathered, 0, start, start + math.prod(spec.shape)), spec.shape)
    rows = view(b, gathered, [spec.size, span]) if spec.size > 1 else gathered
    rows = narrow(b, rows, b.value(rows).dim() - 1, start, start + spec.shard_numel)
    if spec.dim == 0 or spec.size == 1:
        full = view(b, rows, spec.padded_shape)
    else:
        parts = view(b, rows, [spec.size, *spec.shard_shape])
        order = [*range(1, spec.dim + 1), 0, *range(spec.dim + 1, len(spec.shape) + 1)]
        full = view(b, b.call(aten.permute.default, parts, order), spec.padded_shape)
    full = narrow(b, full, spec.dim, 0, spec.shape[spec.dim])
    if spec.order:  # a copy whose dimensions lie in memory in this order, outermost first
        stored = b.call(aten.permute.default, full, list(spec.order))
        stored = b.call(aten.clone.default, stored, memory_format=torch.contiguous_format)
        return b.call(aten.permute.default, stored, inverse(spec.order))
    if b.value(full).is_contiguous():
        return full
    return b.call(aten.clone.default, full, memory_format=torch.contiguous_format)


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`."""
    return sorted(range(len(order)), key=order.__getitem__)


def gradient_rows(b: Builder[T], grad: T, spec: UnshardSpec) -> T:
    """The full gradient as `[size, extent]`: row r is rank r's part after the reduction, padding zero."""
    if spec.dim is None:
        row = pad_end(b, view(b, grad, [1, math.prod(spec.shape)]), 1, spec.extent - math.prod(spec.shape))
        return b.call(aten.expand.default, row, [spec.size, spec.extent]) if spec.size > 1 else row
    grad = pad_end(b, grad, spec.dim, spec.padded_shape[spec.dim] - spec.shape[spec.dim])
    if spec.dim > 0 and spec.size > 1:
        before, after = spec.shape[: spec.dim], spec.shape[spec.dim + 1 :]
        parts = view(b, grad, [*before, spec.size, spec.shard_shape[spec.dim], *after])
        order = [spec.dim, *range(spec.dim), *range(spec.dim + 1, len(spec.shape) + 1)]
        grad = b.call(aten.permute.default, parts, order)
    return pad_end(b, view(b, grad, [spec.size, spec.shard_numel]), 1, spec.extent - spec.shard_numel)
