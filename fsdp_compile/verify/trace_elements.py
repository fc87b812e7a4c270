"""Traces an element of a tensor backward through our nodes to where it comes from, by plain arithmetic on indices.

    %full[2, 7]  <-  %view[519]  <-  %wait[519]  <-  all_gather: rank 1's message, [7]  <-  %flat[391]

No rule trusts the shape of a pattern: whatever nodes a pass writes between a flat parameter and a full parameter, or
between a gradient and the flat gradient, each element must come from its own place. Nodes move whole blocks, so a few
elements of each parameter (`probes`) tell.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compile.ir.graph import Role, require, role_of
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops.host_copy import START_COPY, WAIT_COPY
from fsdp_compile.ops.quantize import BLOCK_SCALES, DEQUANTIZE, QUANTIZE
from fsdp_compile.verify.facts import KINDS, WAIT, Collective, Facts, Kind, shape_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Wire:
    """A format of quantized messages: elements that share a scale, its bytes, and elements in a byte."""

    block: int
    scale_bytes: int
    per_byte: int = 1


WIRES = {"int8": Wire(128, 4), "float8_e4m3fn": Wire(128, 4), "mxfp8": Wire(32, 1), "nvfp4": Wire(16, 1, 2)}
"""By name; written here again, so that a wrong number elsewhere is noticed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The element that an element was copied from, by row-major index; `source` is `None` for a constant zero."""

    source: fx.Node | None
    index: int


def moved(node: fx.Node, index: int, rank: int = 0) -> Step | None:
    """Where the element of `node` at `index` was copied from on a rank; `None` if `node` computes a new value."""
    if str(node.target) == _POST_FORWARD_PART:  # out of a gathered message
        message: fx.Node = node.args[0]  # type: ignore[assignment]
        part = linear_size(node)
        return Step(message, rank % (linear_size(message) // part) * part + index)
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


def _from_bytes(node: fx.Node, index: int) -> Step:
    """To quantized elements or back: a byte of them represents the first one."""
    per_byte = WIRES[node.args[2]].per_byte  # type: ignore[index]
    return Step(node.args[0], index * per_byte if node.target is QUANTIZE else index // per_byte)  # type: ignore[arg-type]


def _block_scale(node: fx.Node, index: int) -> Step:
    """A byte of a scale represents the first element of its block; padding is zero."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    wire = WIRES[node.args[1]]  # type: ignore[index]
    element = index // wire.scale_bytes * wire.block
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
    START_COPY: _same,
    WAIT_COPY: _same,
    QUANTIZE: _from_bytes,
    DEQUANTIZE: _from_bytes,
    BLOCK_SCALES: _block_scale,
    aten.slice.Tensor: _slice,
    aten.permute.default: _permute,
    aten.expand.default: _expand,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
    aten.full.default: lambda node, _: Step(None, 0) if node.args[1] == 0 else None,
    aten.new_zeros.default: lambda *_: Step(None, 0),
    aten.zeros.default: lambda *_: Step(None, 0),
}


def _argument(node: fx.Node, position: int, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else default


_SUMS = (Role.ADD_UNREDUCED, Role.ADD_PARTIAL)
_POST_FORWARD_PART = "fsdp_compile.post_forward_part.default"
LONGEST_CHAIN = 1000
"""Nodes between an element and its origin; more means a cycle."""


@dataclasses.dataclass(frozen=True)
class Hop:
    """A collective on the way of an element; of an all-gather, with the rank that sends the element."""

    collective: Collective
    rank: int | None


@dataclasses.dataclass(frozen=True)
class Addend:
    """Accumulated gradients, where they are added to new ones."""

    at: fx.Node  # the node that adds
    node: fx.Node  # what is added
    index: int  # position of the element that is
    hops: int  # collectives between this sum and the element that was asked for


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an element comes from.

    `node` is an input, a node of the model's, a full parameter, or a node of ours that computes a new value; `None` for
    a constant zero.
    """

    node: fx.Node | None
    index: int  # among the node's elements, row by row
    last: fx.Node  # the node of ours that is nearest to the origin
    hops: tuple[Hop, ...]  # collectives on the way, the one nearest to the element first
    addends: tuple[Addend, ...] = ()  # what was added on the way, nearest to the element first
    divisor: float = 1.0  # what it was divided by on the way


def origin(node: fx.Node, index: int, rank: int) -> Origin:
    """Follows the element at `index` of a tensor back.

    `rank` is that of the tensor in the shard group: a reduce-scatter gives each rank another result.
    """
    hops: list[Hop] = []
    addends: list[Addend] = []
    divisor = 1.0
    start = last = node
    for _ in range(LONGEST_CHAIN):
        role = role_of(node)
        if role is None or node.op == "placeholder" or (role is Role.FULL and node is not start):
            break
        last = node
        if role in _SUMS and node.target is aten.add.Tensor and len(node.all_input_nodes) == 2:
            held, node = node.args[:2]  # type: ignore[assignment]
            addends.append(Addend(last, held, index, len(hops)))  # type: ignore[arg-type]
            continue
        if node.target is aten.div.Tensor and isinstance(node.args[1], int | float):
            divisor *= node.args[1]
            node = node.args[0]  # type: ignore[assignment]
            continue
        try:
            step = _sent(node, index, rank, hops) or moved(node, index, rank)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            break  # a wrong graph may have anything; the rule complains about where the trace ends
        if step is None:
            break
        if step.source is None:
            return Origin(None, 0, last, tuple(hops), tuple(addends), divisor)
        node, index = step.source, step.index
    return Origin(node, index, last, tuple(hops), tuple(addends), divisor)


def _sent(node: fx.Node, index: int, rank: int, hops: list[Hop]) -> Step | None:
    """From an unfinished message to what was sent, with a new entry in `hops`; `None` for any other node."""
    start = node.args[0] if node.target is getitem else node
    if not isinstance(start, fx.Node) or start.target not in KINDS:
        return None
    collective = Collective(start, KINDS[start.target])
    message = collective.sent[node.args[1] if start is not node else 0]  # type: ignore[index]
    numel = math.prod(shape_of(message))
    sending = None
    if collective.kind is Kind.GATHER:
        sending, index = divmod(index, numel)
    elif collective.kind is Kind.REDUCE:
        index += rank * (numel // collective.size)
    hops.append(Hop(collective, sending))
    return Step(message, index)


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat parameter that is the graph input `flat`."""

    flat: fx.Node
    name: str
    spec: UnshardSpec


@dataclasses.dataclass(frozen=True)
class Probe:
    """One element of a full parameter, by row-major index, and its rank and index in that rank's flat parameter."""

    element: int
    rank: int
    place: int


def slots_of(flat: fx.Node) -> list[Slot]:
    """All slots of a flat parameter."""
    record = require(flat)
    return [Slot(flat, name, spec) for name, spec in zip(record.parameters, record.specs, strict=True)]


def all_slots(facts: Facts) -> dict[tuple[str, str], list[Slot]]:
    """Slots by unit and name of the parameter; more than one where two models of one class meet in a graph."""
    found: dict[tuple[str, str], list[Slot]] = {}
    for flat in facts.of_role(Role.FLAT):
        for slot in slots_of(flat):
            found.setdefault((require(flat).unit, slot.name), []).append(slot)
    # The flat parameter of a frozen parameter with a post-forward shard is an input of forward alone.
    for part in facts.of_role(Role.POST_FORWARD_SHARD):
        if part.op == "placeholder":
            for slot in slots_of(part):
                found.setdefault((require(part).unit, slot.name), [slot])
    return found


def probes(spec: UnshardSpec) -> Iterator[Probe]:
    """A few elements that tell whether a parameter's block is where it belongs.

    The first element, the last one, and along each dimension the last with all others first; on the sharded dimension
    also the rows on both sides of the first border between ranks.
    """
    if 0 in spec.shape:
        return
    places = {(0,) * len(spec.shape), tuple(extent - 1 for extent in spec.shape)}
    for dim, extent in enumerate(spec.shape):
        ends = {extent - 1}
        if dim == spec.dim:
            rows = spec.shard_shape[dim]
            ends |= {min(rows - 1, extent - 1), min(rows, extent - 1)}
        places |= {tuple(end if d == dim else 0 for d in range(len(spec.shape))) for end in ends}
    for place in sorted(places):
        element = linear(place, spec.shape)
        if spec.dim is None:
            yield Probe(element, 0, spec.offset + element)
            continue
        rank, row = divmod(place[spec.dim], spec.shard_shape[spec.dim])
        local = (*place[: spec.dim], row, *place[spec.dim + 1 :])
        yield Probe(element, rank, spec.offset + linear(local, spec.shard_shape))
