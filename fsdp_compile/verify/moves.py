"""Operators that copy elements unchanged, and the arithmetic that leads from an element back to the one it copies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile.parameters import copies, quantize  # noqa: F401  they register the operators
from fsdp_compile.verify.collective import WAIT
from fsdp_compile.verify.facts import shape_of

aten = torch.ops.aten
BLOCK_SCALES = torch.ops.fsdp.block_scales.default
QUANTIZE = torch.ops.fsdp.quantize.default
DEQUANTIZE = torch.ops.fsdp.dequantize.default
BLOCK, SCALE_BYTES = 128, 4
"""Elements that share a scale, and its size: written here again on purpose."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """From an element to the one in the node before that it comes from.

    Attributes:
        source: The node before; `None` for a constant zero.
        index: Position among its elements, row by row.
    """

    source: fx.Node | None
    index: int


def moved(node: fx.Node, index: int) -> Step | None:
    """Where the element of `node` at `index` was before; `None` if `node` computes a new value."""
    move = MOVES.get(node.target)
    return None if move is None else move(node, index)


def coordinates(index: int, shape: Sequence[int]) -> list[int]:
    """Position along each dimension of the element at `index` in row-by-row order.

    Raises:
        ValueError: If the shape has fewer elements.
    """
    place = []
    for extent in reversed(shape):
        index, position = divmod(index, extent)
        place.append(position)
    if index:
        raise ValueError("the tensor has fewer elements")
    return place[::-1]


def linear(place: Sequence[int], shape: Sequence[int]) -> int:
    """Index, in row-by-row order, of the element at `place`.

    Raises:
        ValueError: If `place` is outside of the shape.
    """
    index = 0
    for position, extent in zip(place, shape, strict=True):
        if not 0 <= position < extent:
            raise ValueError("the tensor is smaller")
        index = index * extent + position
    return index


def _same(node: fx.Node, index: int) -> Step:
    return Step(node.args[0], index)  # type: ignore[arg-type]


def _slice(node: fx.Node, index: int) -> Step:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dim, start, step = (_argument(node, position, default) for position, default in ((1, 0), (2, 0), (4, 1)))
    shape = shape_of(source)
    place = coordinates(index, shape_of(node))
    start = start or 0
    place[dim] = (start if start >= 0 else start + shape[dim]) + place[dim] * step
    return Step(source, linear(place, shape))


def _permute(node: fx.Node, index: int) -> Step:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dims: Sequence[int] = node.args[1]  # type: ignore[assignment]
    shape = shape_of(source)
    place = [0] * len(shape)
    for position, dim in zip(coordinates(index, shape_of(node)), dims, strict=True):
        place[dim] = position
    return Step(source, linear(place, shape))


def _expand(node: fx.Node, index: int) -> Step:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    shape = shape_of(source)
    place = coordinates(index, shape_of(node))[len(shape_of(node)) - len(shape) :]
    return Step(source, linear([p if n > 1 else 0 for p, n in zip(place, shape, strict=True)], shape))


def _pad(node: fx.Node, index: int) -> Step | None:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    amounts: Sequence[int] = node.args[1]  # type: ignore[assignment]
    shape = shape_of(source)
    place = coordinates(index, shape_of(node))
    for pair in range(len(amounts) // 2):
        place[-1 - pair] -= amounts[2 * pair]
    if all(0 <= p < n for p, n in zip(place, shape, strict=True)):
        return Step(source, linear(place, shape))
    return Step(None, 0) if _argument(node, 2, 0) == 0 else None


def _cat(node: fx.Node, index: int) -> Step | None:
    parts: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    dim: int = _argument(node, 1, 0)
    place = coordinates(index, shape_of(node))
    for part in parts:
        extent = part.meta["val"].shape[dim]  # there may be hundreds of parts
        if place[dim] < extent:
            return Step(part, linear(place, shape_of(part)))
        place[dim] -= extent
    return None


def _constant(node: fx.Node, _: int) -> Step | None:
    return Step(None, 0) if node.args[1] == 0 else None


def _zeros(_: fx.Node, __: int) -> Step:
    return Step(None, 0)


def _block_scale(node: fx.Node, index: int) -> Step:
    """A byte of a scale stands for the first element of its block; padding is zero."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    element = index // SCALE_BYTES * BLOCK
    return Step(source, element) if element < linear_size(source) else Step(None, 0)


def linear_size(node: fx.Node) -> int:
    """Elements of a node's result."""
    return math.prod(shape_of(node))


MOVES: dict[Any, Callable[[fx.Node, int], Step | None]] = {
    aten.view.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    torch.ops.prims.convert_element_type.default: _same,
    WAIT: _same,
    torch.ops.fsdp.start_copy.default: _same,
    torch.ops.fsdp.wait_copy.default: _same,
    QUANTIZE: _same,
    DEQUANTIZE: _same,
    BLOCK_SCALES: _block_scale,
    aten.slice.Tensor: _slice,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
    aten.full.default: _constant,
    aten.new_zeros.default: _zeros,
    aten.zeros.default: _zeros,
}


def _argument(node: fx.Node, position: int, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else default
