"""Where one element of a tensor comes from: followed backward through our nodes, by plain arithmetic on indices.

    %full[2, 7]  <-  %view[519]  <-  %wait[519]  <-  all_gather: rank 1's message, [7]  <-  %flat[391]

No rule trusts the shape of a pattern: whatever nodes a pass writes between a flat shard and a full parameter, or
between a gradient and the flat gradient, each element must come from its own place. Nodes move whole blocks, so a few
elements of each parameter tell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compile.ir.record import Role, role_of
from fsdp_compile.verify.collective import KINDS, WAIT, Collective, Kind
from fsdp_compile.verify.facts import shape_of

aten = torch.ops.aten
LONGEST_CHAIN = 1000
"""Nodes between an element and its origin; more means a cycle."""


@dataclasses.dataclass(frozen=True)
class Hop:
    """A collective that an element travels through.

    Attributes:
        collective: The collective.
        rank: For an all-gather, the rank that sends the element.
    """

    collective: Collective
    rank: int | None


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an element comes from.

    Attributes:
        node: An input, a node of the model's, a full parameter, or a node of ours that computes a new value; `None`
            for a constant zero.
        index: Position among the node's elements, row by row.
        hops: Collectives on the way, the one nearest to the element first.
    """

    node: fx.Node | None
    index: int
    hops: tuple[Hop, ...]


def origin(node: fx.Node, index: int, rank: int) -> Origin:
    """Follows one element back.

    Args:
        node: The tensor that holds the element.
        index: Position among its elements, row by row.
        rank: The rank, of the shard group, that is looked at: a reduce-scatter gives each rank something else.
    """
    hops: list[Hop] = []
    start = node
    for _ in range(LONGEST_CHAIN):
        role = role_of(node)
        if role is None or role is Role.FLAT or (role is Role.FULL and node is not start):
            break
        sender = _sender(node)
        if sender is not None:
            collective, message = sender
            index, from_rank = _before_collective(collective, message, index, rank)
            hops.append(Hop(collective, from_rank))
            node = message
            continue
        move = _MOVES.get(node.target)
        step = None if move is None else move(node, index)
        if step is None:
            break
        source, index = step
        if source is None:
            return Origin(None, 0, tuple(hops))
        node = source
    return Origin(node, index, tuple(hops))


def _sender(node: fx.Node) -> tuple[Collective, fx.Node] | None:
    """The collective that a node is an unfinished message of, and what was sent as that message."""
    kind = KINDS.get(node.target)
    if kind is not None:
        return Collective(node, kind), node.args[0]  # type: ignore[return-value]
    start = node.args[0] if node.target is getitem else None
    if isinstance(start, fx.Node) and start.target in KINDS:
        return Collective(start, KINDS[start.target]), start.args[0][node.args[1]]  # type: ignore[index, return-value]
    return None


def _before_collective(collective: Collective, message: fx.Node, index: int, rank: int) -> tuple[int, int | None]:
    """Index in the message that was sent, and which rank's message it was if that is not every rank's."""
    numel = math.prod(shape_of(message))
    if collective.kind is Kind.GATHER:
        return index % numel, index // numel
    if collective.kind is Kind.REDUCE:
        return rank * (numel // collective.size) + index, None
    return index, None


Step = tuple[fx.Node | None, int]


def _same(node: fx.Node, index: int) -> Step:
    return node.args[0], index  # type: ignore[return-value]


def _slice(node: fx.Node, index: int) -> Step:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dim, start, step = (_argument(node, position, default) for position, default in ((1, 0), (2, 0), (4, 1)))
    shape = shape_of(source)
    place = coordinates(index, shape_of(node))
    place[dim] = (start or 0) % (shape[dim] + 1) + place[dim] * step
    return source, linear(place, shape)


def _permute(node: fx.Node, index: int) -> Step:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    dims: Sequence[int] = node.args[1]  # type: ignore[assignment]
    shape = shape_of(source)
    place = [0] * len(shape)
    for position, dim in zip(coordinates(index, shape_of(node)), dims, strict=True):
        place[dim] = position
    return source, linear(place, shape)


def _expand(node: fx.Node, index: int) -> Step:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    shape = shape_of(source)
    place = coordinates(index, shape_of(node))[len(shape_of(node)) - len(shape) :]
    return source, linear([p if n > 1 else 0 for p, n in zip(place, shape, strict=True)], shape)


def _pad(node: fx.Node, index: int) -> Step | None:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    amounts: Sequence[int] = node.args[1]  # type: ignore[assignment]
    shape = shape_of(source)
    place = coordinates(index, shape_of(node))
    for pair in range(len(amounts) // 2):
        place[-1 - pair] -= amounts[2 * pair]
    if all(0 <= p < n for p, n in zip(place, shape, strict=True)):
        return source, linear(place, shape)
    return (None, 0) if _argument(node, 2, 0) == 0 else None


def _cat(node: fx.Node, index: int) -> Step | None:
    parts: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    dim: int = _argument(node, 1, 0)
    place = coordinates(index, shape_of(node))
    for part in parts:
        extent = shape_of(part)[dim]
        if place[dim] < extent:
            return part, linear(place, shape_of(part))
        place[dim] -= extent
    return None


def _constant(node: fx.Node, _: int) -> Step | None:
    return (None, 0) if node.args[1] == 0 else None


def _zeros(_: fx.Node, __: int) -> Step:
    return None, 0


_MOVES: dict[Any, Callable[[fx.Node, int], Step | None]] = {
    aten.view.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _same,
    torch.ops.prims.convert_element_type.default: _same,
    WAIT: _same,
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


def coordinates(index: int, shape: Sequence[int]) -> list[int]:
    """Position along each dimension of the element at `index` in row-by-row order."""
    place = []
    for extent in reversed(shape):
        index, position = divmod(index, extent)
        place.append(position)
    return place[::-1]


def linear(place: Sequence[int], shape: Sequence[int]) -> int:
    """Index, in row-by-row order, of the element at `place`."""
    index = 0
    for position, extent in zip(place, shape, strict=True):
        index = index * extent + position
    return index
