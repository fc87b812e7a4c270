"""Starts each all-gather early: while the bucket before it computes.

    wait 0, compute 0, gather 1, wait 1, compute 1   ->   gather 1, wait 0, compute 0, wait 1, compute 1

A gather is moved before the wait of the bucket that is `distance` before it, so at most `distance + 1` buckets are
gathered at once. The first ones start at the top of the graph. Only starts are moved, in the order they had.

A shard on the host is copied to the device one bucket earlier still, so that no gather waits for the bus:

    copy 0, copy 1, gather 0, copy 2, gather 1, wait 0, compute 0, copy 3, gather 2, wait 1, compute 1

Where nothing is gathered (one rank, or replicas alone), units are copied one unit ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from torch import fx

from fsdp_compile.ir.edit import move, with_needs
from fsdp_compile.ir.graph import SENT, Role, Stage, StepGraph, require, role_of
from fsdp_compile.ir.queries import first_of, upstream


@dataclasses.dataclass(frozen=True)
class Move:
    """Start `gather` right before `anchor`."""

    gather: fx.Node
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class CopyMove:
    """Start `copy`, from the host to the device, right before `anchor`."""

    copy: fx.Node
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class PrefetchPlan:
    """Moves in graph order."""

    moves: tuple[Move | CopyMove, ...]


@dataclasses.dataclass(frozen=True)
class SchedulePrefetch:
    """The pass; a gather starts `distance` buckets ahead, with 0 where it is needed."""

    distance: int = 1
    name = "schedule-prefetch"
    stage = Stage.BUCKETED

    def plan(self, step: StepGraph) -> PrefetchPlan:
        """Finds the anchor of each gather."""
        if self.distance == 0:
            return PrefetchPlan(())
        gathers = list(step.nodes(Role.GATHER))
        order = step.order()
        top = top_of(step)
        anchors = [
            top if k < self.distance else first_wait(gathers[k - self.distance], order) for k in range(len(gathers))
        ]
        moves: list[Move | CopyMove] = []
        for k, (gather, anchor) in enumerate(zip(gathers, anchors, strict=True)):
            ahead = gathers[k + 1 : k + 2] if k else gathers[:2]
            moves += [CopyMove(copy, anchor) for each in ahead for copy in copies_to(each)]
            moves.append(Move(gather, anchor))
        return PrefetchPlan((*moves, *lone_copies(step)))

    def apply(self, step: StepGraph, plan: PrefetchPlan) -> None:
        """Moves the copies, each with its slice, and the gathers, each with the casts that it sends."""
        move(step.graph, with_what_is_sent(plan.moves))


def top_of(step: StepGraph) -> fx.Node:
    """The first node of a graph that sends nothing."""
    return next(n for n in step.graph.nodes if n.op != "placeholder" and role_of(n) not in (*SENT, Role.GATHER))


def with_what_is_sent(moves: Iterable[Move | CopyMove]) -> Iterator[tuple[list[fx.Node], fx.Node]]:
    """What moves in each, and where to."""
    for one in moves:
        start = one.copy if isinstance(one, CopyMove) else one.gather
        yield with_needs(start, one.anchor), one.anchor


def copies_to(gather: fx.Node) -> list[fx.Node]:
    """Starts of the copies from the host that a gather sends."""
    return [node for node in upstream(gather, *SENT) if role_of(node) is Role.OFFLOAD_IN]


def lone_copies(step: StepGraph) -> list[CopyMove]:
    """Moves of the copies that no gather sends to where the unit ahead of their own waits for its first copy."""
    units: dict[str, list[fx.Node]] = {}
    for copy in step.nodes(Role.OFFLOAD_IN):
        if require(copy).specs[0].size == 1:
            units.setdefault(require(copy).unit, []).append(copy)
    waits = [next(iter(copies[0].users)) for copies in units.values()]
    # The first two units are copied before the first wait: no unit runs ahead of the first one.
    anchors = [*waits[:1], *waits]
    return [CopyMove(copy, a) for copies, a in zip(units.values(), anchors, strict=False) for copy in copies]


def first_wait(gather: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The first wait for any message of a gather."""
    started = [gather, *(user for user in gather.users if role_of(user) is Role.GATHER_ITEM)]
    return first_of([u for s in started for u in s.users if role_of(u) is Role.GATHER_WAIT], order)
