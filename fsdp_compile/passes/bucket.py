"""Joins the collectives of a unit: one grouped all-gather and one grouped reduce-scatter per unit.

    wait(all_gather(%w)), wait(all_gather(%b))  ->  all_gather_coalesced([%w, %b]), then a wait per message

Small parameters lie side by side in the flat shard and travel as one packed message; every large one is a message of
its own that lands in its own contiguous memory, so that a matmul reads it in place. Nothing is copied before a gather.
The gather starts where the unit is read first, the reduce-scatter where its last gradient is ready.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from operator import getitem

import torch
from torch import fx

from fsdp_compile._torch import OpOverload, collectives
from fsdp_compile.ir.edit import GraphBuilder, erase_unused
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import first_of, last_of, upstream
from fsdp_compile.ir.record import Record, Role, require
from fsdp_compile.parameters import assemble
from fsdp_compile.parameters.layout import LARGE_BYTES
from fsdp_compile.parameters.spec import ReadSpec
from fsdp_compile.passes.insert_collectives import average_over_replicas, full_node, join_pieces

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Single:
    """One parameter's collective, as insert-collectives left it.

    Attributes:
        start: The node that starts it.
        flat: The flat shard that it reads, or whose gradient it makes.
        end: The full parameter, or the reduced shard.
    """

    start: fx.Node
    flat: fx.Node
    end: fx.Node

    @property
    def spec(self) -> ReadSpec:
        """The parameter's place."""
        return require(self.start).specs[0]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Adjacent slots of one flat shard that travel as one message."""

    singles: tuple[Single, ...]

    @property
    def flat(self) -> fx.Node:
        """The flat shard that the slots lie in."""
        return self.singles[0].flat

    @property
    def begin(self) -> int:
        """First element in the flat shard."""
        return self.singles[0].spec.offset

    @property
    def span(self) -> int:
        """Elements per rank."""
        return self.singles[-1].spec.offset + self.singles[-1].spec.extent - self.begin

    def record(self, role: Role) -> Record:
        """The record of a node that serves the whole piece."""
        return _joint_record(self.singles, role)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Pieces that share one grouped collective, in the order of the group."""

    pieces: tuple[Piece, ...]

    @property
    def singles(self) -> tuple[Single, ...]:
        """All parameters of the bucket."""
        return tuple(single for piece in self.pieces for single in piece.singles)


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Buckets of both kinds."""

    gathers: tuple[Bucket, ...]
    reductions: tuple[Bucket, ...]


class BucketCollectives:
    """The pass; see the module's docstring."""

    name = "bucket"

    def plan(self, step: StepGraph) -> BucketPlan:
        """One bucket per unit, group and dtype of the message."""
        gathers = [_gather_single(node) for node in step.nodes(Role.GATHER)]
        reductions = [_reduce_single(node) for node in step.nodes(Role.REDUCE)]
        return BucketPlan(tuple(_buckets(gathers)), tuple(_buckets(reductions)))

    def apply(self, step: StepGraph, plan: BucketPlan) -> None:
        """Writes the grouped collectives and erases the single ones."""
        order = step.order()  # of the nodes that are there now, which inserting others does not change
        for bucket in plan.gathers:
            _write_gather(step, bucket, order)
        if plan.reductions:
            _write_reductions(step, plan.reductions, order)


def _gather_single(start: fx.Node) -> Single:
    shard = start.args[0]
    while require(shard).role is Role.SHARD:  # type: ignore[arg-type]
        shard = shard.args[0]  # type: ignore[union-attr]
    end = start
    while require(end).role is not Role.FULL:
        end = next(iter(end.users))
    return Single(start, shard, end)  # type: ignore[arg-type]


def _reduce_single(start: fx.Node) -> Single:
    end = start
    while require(after := next(iter(end.users))).role in (Role.REDUCE_WAIT, Role.REPLICATE, Role.REPLICATE_WAIT):
        end = after
    joined = end
    while require(joined).role is not Role.FLAT_GRADIENT:
        joined = next(iter(joined.users))
    flat = next(n for n in start.graph.find_nodes(op="placeholder") if _same_flat(n, joined))
    return Single(start, flat, end)


def _same_flat(placeholder: fx.Node, gradient: fx.Node) -> bool:
    record = placeholder.meta.get("fsdp")
    return record is not None and (record.unit, record.parameters) == (
        require(gradient).unit,
        require(gradient).parameters,
    )


def _buckets(singles: Iterable[Single]) -> list[Bucket]:
    groups: dict[tuple[str, str, torch.dtype], list[Single]] = {}
    for single in singles:
        record = require(single.start)
        key = (record.unit, single.spec.group, single.start.args[0].meta["val"].dtype)  # type: ignore[union-attr]
        groups.setdefault(key, []).append(single)
    return [Bucket(tuple(_pieces(group))) for group in groups.values()]


def _pieces(singles: Sequence[Single]) -> list[Piece]:
    """Small neighbours joined, large ones apart; flat shard by flat shard, by offset."""
    flats = list(dict.fromkeys(single.flat for single in singles))
    pieces: list[Piece] = []
    for single in sorted(singles, key=lambda s: (flats.index(s.flat), s.spec.offset)):
        last = pieces[-1] if pieces else None
        if last is not None and _is_small(single) and _is_small(last.singles[-1]) and _adjacent(last, single):
            pieces[-1] = Piece((*last.singles, single))
        else:
            pieces.append(Piece((single,)))
    return pieces


def _is_small(single: Single) -> bool:
    return single.spec.shard_numel * single.flat.meta["val"].element_size() < LARGE_BYTES


def _adjacent(piece: Piece, single: Single) -> bool:
    return piece.flat is single.flat and piece.begin + piece.span == single.spec.offset


def _joint_record(singles: Sequence[Single], role: Role) -> Record:
    first = require(singles[0].start)
    names = tuple(name for s in singles for name in require(s.start).parameters)
    return Record(role, first.unit, names, tuple(s.spec for s in singles), first.phase)


def _write_gather(step: StepGraph, bucket: Bucket, order: dict[fx.Node, int]) -> None:
    first = first_of([s.start for s in bucket.singles], order)
    anchor = first_of([*upstream(first, Role.SHARD), first], order)
    spec = bucket.singles[0].spec
    b = GraphBuilder(step.graph, _joint_record(bucket.singles, Role.SHARD), first)
    with step.graph.inserting_before(anchor):
        messages = [_shard_message(b, piece) for piece in bucket.pieces]
        waited = start_grouped(
            b, collectives.all_gather_into_tensor_coalesced.default, (messages, spec.size, spec.group), bucket.pieces,
            (Role.GATHER, Role.GATHER_ITEM, Role.GATHER_WAIT),
        )  # fmt: skip
    # Each full parameter is written where its own read was, so that copies out stay next to their first use.
    for piece, message in zip(bucket.pieces, waited, strict=True):
        for single in piece.singles:
            b = GraphBuilder(step.graph, _joint_record([single], Role.FULL), single.start)
            with step.graph.inserting_before(single.end):
                full = full_node(b, message, single.spec, start=single.spec.offset - piece.begin, span=piece.span)
            single.end.replace_all_uses_with(full)
    for single in bucket.singles:
        _erase_chain(single)


def _shard_message(b: GraphBuilder, piece: Piece) -> fx.Node:
    b.record = piece.record(Role.SHARD)
    message = assemble.narrow(b, piece.flat, 0, piece.begin, piece.begin + piece.span)
    return assemble.cast(b, message, piece.singles[0].spec.param_dtype)


def start_grouped(
    b: GraphBuilder,
    op: OpOverload,
    args: tuple[object, ...],
    pieces: Sequence[Piece],
    roles: tuple[Role, Role, Role],
) -> list[fx.Node]:
    """Records a grouped collective, its items and a wait for each; returns the waits."""
    start_role, item_role, wait_role = roles
    b.record = _joint_record([s for piece in pieces for s in piece.singles], start_role)
    started = b.call(op, *args)
    items = []
    for index, piece in enumerate(pieces):
        b.record = piece.record(item_role)
        items.append(b.call(getitem, started, index))
    waits = []
    for item, piece in zip(items, pieces, strict=True):
        b.record = piece.record(wait_role)
        waits.append(b.call(collectives.wait_tensor.default, item))
    return waits


def _write_reductions(step: StepGraph, buckets: Sequence[Bucket], order: dict[fx.Node, int]) -> None:
    reduced: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
    for bucket in buckets:
        for piece, shard in zip(bucket.pieces, _write_reduction(step, bucket, order), strict=True):
            reduced.setdefault(piece.flat, []).append((piece.begin, shard))
    for flat, pieces in reduced.items():
        _rewrite_flat_gradient(step, flat, pieces)
    for bucket in buckets:
        for single in bucket.singles:
            _erase_chain(single)


def _write_reduction(step: StepGraph, bucket: Bucket, order: dict[fx.Node, int]) -> list[fx.Node]:
    final = last_of([s.start for s in bucket.singles], order)
    spec = bucket.singles[0].spec
    b = GraphBuilder(step.graph, _joint_record(bucket.singles, Role.GRADIENT), final)
    with step.graph.inserting_before(final):
        messages = [_gradient_message(b, piece) for piece in bucket.pieces]
        waited = start_grouped(
            b, collectives.reduce_scatter_tensor_coalesced.default, (messages, "avg", spec.size, spec.group),
            bucket.pieces, (Role.REDUCE, Role.REDUCE_ITEM, Role.REDUCE_WAIT),
        )  # fmt: skip
        return [_averaged(b, piece, shard) for piece, shard in zip(bucket.pieces, waited, strict=True)]


def _averaged(b: GraphBuilder, piece: Piece, shard: fx.Node) -> fx.Node:
    b.record = piece.record(Role.SHARD_GRADIENT)
    return average_over_replicas(b, shard, piece.singles[0].spec)


def _sent(single: Single) -> fx.Node:
    """The message of a single collective."""
    message = single.start.args[0]
    assert isinstance(message, fx.Node)
    return message


def _gradient_message(b: GraphBuilder, piece: Piece) -> fx.Node:
    """`[size * span]`: rank after rank, each with its rows of every gradient in the piece."""
    b.record = piece.record(Role.GRADIENT)
    if len(piece.singles) == 1:
        return _sent(piece.singles[0])
    rows = [assemble.view(b, _sent(s), [s.spec.size, s.spec.extent]) for s in piece.singles]
    return assemble.view(b, b.call(aten.cat.default, rows, 1), [piece.singles[0].spec.size * piece.span])


def _rewrite_flat_gradient(step: StepGraph, flat: fx.Node, pieces: list[tuple[int, fx.Node]]) -> None:
    old = next(n for n in step.nodes(Role.FLAT_GRADIENT) if _same_flat(flat, n))
    old_parts = upstream(old, Role.SHARD_GRADIENT)
    record = dataclasses.replace(require(old), role=Role.SHARD_GRADIENT)
    with step.graph.inserting_before(step.output):
        new = join_pieces(GraphBuilder(step.graph, record, old), flat, pieces)
    new.meta["fsdp"] = require(old)
    old.replace_all_uses_with(new)
    step.graph.erase_node(old)
    erase_unused(old_parts)


def _erase_chain(single: Single) -> None:
    """Erases a single collective, from its unused end back to what it was made of."""
    node: fx.Node = single.end
    roles = {Role.SHARD, Role.GATHER, Role.GATHER_WAIT, Role.COPY_OUT, Role.FULL}
    roles |= {Role.GRADIENT, Role.REDUCE, Role.REDUCE_WAIT, Role.REPLICATE, Role.REPLICATE_WAIT}
    todo = [node]
    while todo:
        node = todo.pop()
        record = node.meta.get("fsdp")
        if record is not None and record.role in roles and not node.users:
            todo.extend(node.all_input_nodes)
            node.graph.erase_node(node)
