"""Joins the collectives of a unit: one grouped all-gather, one grouped reduce-scatter and all-reduce per unit.

    wait(all_gather(%w)), wait(all_gather(%b))  ->  all_gather_coalesced([%w, %b]), then a wait per message

1. Parameters of one unit, group and dtype share a collective. Tiny units share one, and units at the edges of the graph
   are split, as `bucketing/grouping.py` says; or it is as in another rank's plan (`follow_order.py`).
2. Small parameters that are neighbours in the flat parameter are one packed message. Every large one is a message of
   its own, in contiguous memory that a matmul reads in place, or packed, if that takes less time.
3. A gather starts where its first parameter is read. Nothing is copied before it, and neighbours are cast at once
   (`bucketing/copies.py`). Each parameter is copied out where its own read was.
4. A reduction starts where its last gradient is ready, with all its stages; or as one message in FSDP2's layout
   (`bucketing/fsdp2_layout.py`). Flat gradients are joined again, at the end of the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.errors import InvariantError
from fsdp_compile.ir.edit import GraphBuilder, erase_unused
from fsdp_compile.ir.graph import GRADIENTS, SENT, Role, Stage, StepGraph, require, role_of
from fsdp_compile.ir.queries import InputsByFlat, first_of, flat_of, last_of, upstream
from fsdp_compile.ir.source_line import source_line
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.layout.messages import narrow, view
from fsdp_compile.passes.bucketing.copies import cast_together, copy_together
from fsdp_compile.passes.bucketing.fsdp2_layout import Reduced, write_packed_reduction
from fsdp_compile.passes.bucketing.grouping import Groups, can_be_joined, cheapest_bucket, edges_of, join_neighbours
from fsdp_compile.passes.bucketing.messages import (
    Bucket,
    Message,
    ParamCollective,
    by_offset,
    by_unit,
    joint_record,
    start_grouped,
)
from fsdp_compile.passes.emit import (
    ON_THE_WAY,
    STARTS,
    add_partial,
    full_node,
    messages_of,
    post_forward_part,
    received,
    scale_after,
    stages,
)
from fsdp_compile.passes.follow_order import FollowOrder, cannot_follow
from fsdp_compile.passes.insert_collectives import join_pieces

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Buckets of both kinds."""

    gathers: tuple[Bucket, ...]
    reductions: tuple[Bucket, ...]


@dataclasses.dataclass(frozen=True)
class BucketCollectives:
    """The pass; see the module's docstring."""

    hardware: Hardware | None = None  # its times choose what is one message
    whole: bool = True  # the graph is all of its model
    reduce_layout: ReduceLayout = ReduceLayout.ALIGNED  # of reductions; FSDP2's messages are neither split nor joined
    join_bytes: int = 0  # of full parameters, or of full gradients, up to which units share collectives
    follow: FollowOrder | None = None  # which parameters share a collective is as in another rank's plan
    name = "bucket"
    requires, ensures = Stage.INSERTED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> BucketPlan:
        """One bucket per unit, groups and dtype of the message; several at the edges, one for several tiny units."""
        flats, partials = InputsByFlat(step.graph, Role.FLAT), InputsByFlat(step.graph, Role.PARTIAL_GRAD)
        gathered = [_gather_single(node) for node in step.nodes(Role.GATHER)]
        # A reduction begins at the stage that sends a gradient.
        begun = [node for node in step.nodes(*STARTS) if role_of(node.all_input_nodes[0]) is Role.GRADIENT]
        reduced = [_reduce_single(node, flats) for node in begun]
        if self.follow is not None:
            gathers, reductions = self.follow.group(step, gathered), self.follow.group(step, reduced)
            for group in (*gathers, *reductions):
                units = {require(single.start).unit for single in group}
                if len(units) > 1 and not all(can_be_joined(single, partials) for single in group):
                    raise cannot_follow(step)
        else:
            gathers, reductions = self._grouped(step, gathered, reduced, partials)
        for_reductions = self.hardware if self.reduce_layout is ReduceLayout.ALIGNED else None
        return BucketPlan(
            tuple(cheapest_bucket(group, self.hardware, partials) for group in gathers),
            tuple(cheapest_bucket(group, for_reductions, partials) for group in reductions),
        )

    def _grouped(
        self,
        step: StepGraph,
        gathered: Sequence[ParamCollective],
        reduced: Sequence[ParamCollective],
        partials: InputsByFlat,
    ) -> tuple[Groups, Groups]:
        """By this graph's own sizes."""
        is_aligned = self.reduce_layout is ReduceLayout.ALIGNED
        gathers, reductions = by_unit(gathered), by_unit(reduced)
        if self.join_bytes:
            gathers = join_neighbours(gathers, self.join_bytes, partials)
        if self.join_bytes and is_aligned:
            order = step.order()
            reductions.sort(key=lambda group: max(order[single.start] for single in group))
            reductions = join_neighbours(reductions, self.join_bytes, partials)
        if self.hardware is not None:
            edges = edges_of(step, self.hardware, whole=self.whole)
            gathers = edges.split(gathers, Kind.GATHER)
            if is_aligned:
                reductions = edges.split(reductions, Kind.REDUCE)
        return [by_offset(group) for group in gathers], [by_offset(group) for group in reductions]

    def apply(self, step: StepGraph, plan: BucketPlan) -> None:
        """Writes the grouped collectives and erases the single ones."""
        order = step.order()  # of the existing nodes, which inserting others does not change
        for bucket in plan.gathers:
            _write_gather(step, bucket, order)
        if plan.reductions:
            _write_reductions(step, plan.reductions, order, self.reduce_layout)


def _gather_single(start: fx.Node) -> ParamCollective:
    shard = start.all_input_nodes[0]
    while require(shard).role in SENT:
        shard = shard.all_input_nodes[0]
    return ParamCollective(start, shard, _chain(start)[-1])


def _chain(start: fx.Node) -> list[fx.Node]:
    """The steps of a single gather up to its full parameter."""
    roles = (Role.GATHER_ITEM, Role.GATHER_WAIT, Role.COPY_OUT, Role.FULL)
    chain = [start]
    while require(chain[-1]).role is not Role.FULL:
        following = next((user for user in chain[-1].users if role_of(user) in roles), None)
        if following is None:
            raise InvariantError(
                f"%{chain[-1]} leads to no full parameter",
                where=source_line(chain[-1]),
                instead="gathers as insert-collectives leaves them",
            )
        chain.append(following)
    return chain


def _reduce_single(start: fx.Node, flats: InputsByFlat) -> ParamCollective:
    end = start
    while require(after := next(iter(end.users))).role in ON_THE_WAY:
        end = after
    joined = end
    while require(joined).role not in GRADIENTS:
        joined = next(iter(joined.users))
    flat = flats.of(joined)
    assert flat is not None
    return ParamCollective(start, flat, end)


def _write_gather(step: StepGraph, bucket: Bucket, order: dict[fx.Node, int]) -> None:
    first = first_of([s.start for s in bucket.singles], order)
    anchor = first_of([*upstream(first, *SENT), first], order)
    b = GraphBuilder(step.graph, joint_record(bucket.singles, Role.SHARD), first)
    with step.graph.inserting_before(anchor):
        cast = cast_together(b, [run for piece in bucket.pieces for run in piece.adjacent])
        sent = [(piece, message) for piece in bucket.pieces for message in _shard_messages(b, piece, cast)]
        arguments = ([message for _, message in sent], *first.args[1:])
        waited = start_grouped(
            b, collectives.all_gather_into_tensor_coalesced.default, arguments, [piece for piece, _ in sent],
            (Role.GATHER, Role.GATHER_ITEM, Role.GATHER_WAIT),
        )  # fmt: skip
    # Written where its own read was, so that copies out are next to their first use.
    for piece in bucket.pieces:
        arrived = [message for (sender, _), message in zip(sent, waited, strict=True) if sender is piece]
        parts = copy_together(step, piece, arrived[0], order) if len(arrived) == 1 else {}
        for single in piece.singles:
            b = GraphBuilder(step.graph, joint_record([single], Role.FULL), single.start)
            with step.graph.inserting_before(single.end):
                message = arrived[0] if single.is_post_forward else received(b, arrived, single.spec)
                if single in parts:
                    full = b.call(aten.view.default, parts[single], list(single.spec.shape))
                else:
                    full = full_node(b, message, single.spec, start=piece.starts[single], span=piece.span)
            single.end.replace_all_uses_with(full)
        _rewrite_parts(step, piece, message, order)
    for single in bucket.singles:
        _erase_chain(single)


def _rewrite_parts(step: StepGraph, piece: Message, message: fx.Node, order: dict[fx.Node, int]) -> None:
    """Copies this rank's post-forward shard of a piece out of its message, and of it the part of each parameter."""
    users = ((single, user) for single in piece.singles for node in _chain(single.start) for user in node.users)
    kept = {single: user for single, user in users if role_of(user) is Role.POST_FORWARD_SHARD}
    if not kept:
        return
    first = first_of(kept.values(), order)
    b = GraphBuilder(step.graph, piece.record(Role.POST_FORWARD_SHARD), first)
    with step.graph.inserting_before(first):
        part = post_forward_part(b, message)  # at once, and once for the piece: the message is freed afterwards
    for single, node in kept.items():
        spec, begin = single.spec, piece.starts[single]
        b.record = joint_record([single], Role.POST_FORWARD_SHARD)
        with step.graph.inserting_before(node):
            mine = part
            if len(piece.singles) > 1:
                rows = view(b, part, [spec.size // spec.post_forward_size, piece.span])
                mine = view(b, narrow(b, rows, 1, begin, begin + spec.extent), [spec.post_forward_numel])
            node.replace_all_uses_with(mine)
        step.graph.erase_node(node)


def _shard_messages(b: GraphBuilder, piece: Message, cast: Mapping[Message, fx.Node]) -> list[fx.Node]:
    if piece.singles[0].is_post_forward:
        return [piece.flat]  # a message as it is
    messages = []
    for run in piece.adjacent:
        if run in cast:
            messages.append([cast[run]])
            continue
        b.record = run.record(Role.SHARD)
        messages.append(messages_of(b, run.flat, run.begin, run.span, run.singles[0].spec))
    if len(messages) == 1:
        return messages[0]
    b.record = piece.record(Role.SHARD)
    return [b.call(aten.cat.default, [part for parts in messages for part in parts])]


def _write_reductions(
    step: StepGraph, planned: Sequence[Bucket], order: dict[fx.Node, int], layout: ReduceLayout
) -> None:
    write = _write_reduction if layout is ReduceLayout.ALIGNED else write_packed_reduction
    partials = InputsByFlat(step.graph, Role.PARTIAL_GRAD)
    reduced: dict[fx.Node, list[tuple[int, fx.Node]]] = {}
    for bucket in planned:
        for flat, begin, shard in write(step, bucket, order, partials):
            reduced.setdefault(flat, []).append((begin, shard))
    gradients: dict[Hashable, fx.Node] = {}
    for node in step.nodes(Role.FLAT_GRADIENT, Role.PARTIAL_GRADIENT):
        gradients.setdefault(flat_of(require(node)), node)
    for flat, pieces in reduced.items():
        _rewrite_flat_gradient(step, gradients[flat_of(require(flat))], pieces)
    for bucket in planned:
        for single in bucket.singles:
            _erase_chain(single)


def _write_reduction(
    step: StepGraph, bucket: Bucket, order: dict[fx.Node, int], partials: InputsByFlat
) -> list[Reduced]:
    """Writes all stages at the place where the last gradient is ready."""
    final = last_of([s.start for s in bucket.singles], order)
    b = GraphBuilder(step.graph, joint_record(bucket.singles, Role.GRADIENT), final)
    with step.graph.inserting_before(final):
        messages = [_gradient_message(b, piece) for piece in bucket.pieces]
        for roles, _, operator, arguments in stages(bucket.spec):
            for index, piece in enumerate(bucket.pieces if Role.REPLICATE in roles else ()):
                # What earlier backward passes have accumulated; pieces of several flat parameters have none.
                b.record = piece.record(Role.ADD_PARTIAL)
                messages[index] = add_partial(b, partials.of(piece.flat), piece.begin, messages[index])
            messages = start_grouped(b, operator, (messages, *arguments), bucket.pieces, roles)
        reduced: list[Reduced] = []
        for piece, message in zip(bucket.pieces, messages, strict=True):
            b.record = piece.record(Role.SHARD_GRADIENT)
            average = scale_after(b, message, piece.singles[0].spec)
            for run in piece.adjacent:
                start = piece.starts[run.singles[0]]
                b.record = run.record(Role.SHARD_GRADIENT)
                reduced.append((run.flat, run.begin, narrow(b, average, 0, start, start + run.span)))
    return reduced


def _gradient_message(b: GraphBuilder, piece: Message) -> fx.Node:
    """`[size * span]`: rank after rank, each with its rows of every gradient in the piece."""
    b.record = piece.record(Role.GRADIENT)
    if len(piece.singles) == 1:
        return piece.singles[0].sent
    rows = [view(b, s.sent, [s.spec.size, s.spec.extent]) for s in piece.singles]
    return view(b, b.call(aten.cat.default, rows, 1), [piece.singles[0].spec.size * piece.span])


def _rewrite_flat_gradient(step: StepGraph, old: fx.Node, pieces: list[tuple[int, fx.Node]]) -> None:
    old_parts = upstream(old, Role.SHARD_GRADIENT, Role.OFFLOAD_OUT, Role.OFFLOAD_OUT_WAIT)
    # Among the parts are gradients of looked-up rows: no bucket reduces them.
    parts = dict.fromkeys(part for node in (old, *old_parts) for part in node.all_input_nodes)
    averages = [node for node in parts if role_of(node) is Role.AVERAGE_ROWS]
    pieces = pieces + [(require(node).specs[0].offset, node) for node in averages]
    record = dataclasses.replace(require(old), role=Role.SHARD_GRADIENT)
    with step.graph.inserting_before(step.output):
        new = join_pieces(GraphBuilder(step.graph, record, old), old, pieces)
    new.meta["fsdp"] = require(old)
    old.replace_all_uses_with(new)
    step.graph.erase_node(old)
    erase_unused(old_parts)


def _erase_chain(single: ParamCollective) -> None:
    """Erases a single collective, from its unused end back to its inputs."""
    gathers = {*SENT, Role.GATHER, Role.GATHER_ITEM, Role.GATHER_WAIT, Role.COPY_OUT, Role.FULL}
    roles = {*gathers, Role.GRADIENT, *ON_THE_WAY}
    todo, erased = [single.end], set[fx.Node]()
    while todo:
        node = todo.pop()
        if role_of(node) in roles and not node.users and node not in erased:
            todo.extend(node.all_input_nodes)
            node.graph.erase_node(node)
            erased.add(node)
