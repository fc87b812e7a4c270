"""Starts all-gathers early, by fixed rules: a number of buckets ahead, or FSDP1's.

`SchedulePrefetch` starts each while the bucket before it computes:

    wait 0, compute 0, gather 1, wait 1, compute 1   ->   gather 1, wait 0, compute 0, wait 1, compute 1

A gather is moved before the wait of the bucket that is `distance` before it, so at most `distance + 1` buckets are
gathered at once. The first ones start at the top of the graph. Only starts are moved, in the order they had.

`ScheduleFSDP1` has two rules. BACKWARD_PRE, and forward prefetch: where the bucket before it is waited for, so that
both are unsharded while it computes.

    wait 1, compute 1, reduce 1, gather 0, wait 0   ->   gather 0, wait 1, compute 1, reduce 1, wait 0

BACKWARD_POST: where each bucket is freed that is freed before it is needed, and the gradients of the one before it are
ready, ahead of their reduction on the link.

    wait 1, compute 1, reduce 1, gather 0, wait 0   ->   wait 1, compute 1, gather 0, reduce 1, wait 0

Nothing starts ahead of the first bucket then, which is gathered where it is needed; without a limit all start at the
top.

By each rule, a shard on the host is copied to the device one bucket earlier still, so that no gather waits for the bus:

    copy 0, copy 1, gather 0, copy 2, gather 1, wait 0, compute 0, copy 3, gather 2, wait 1, compute 1

Where nothing is gathered (one rank, or replicas alone), units are copied one unit ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from fsdp_compile.config.prefetch import Ahead
from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.ir.edit import move, with_needs
from fsdp_compile.ir.graph import SENT, Phase, Role, Stage, StepGraph, require, role_of
from fsdp_compile.ir.queries import aliases, first_of, last_of, upstream
from fsdp_compile.passes.schedule_reduce import chains_of, first_message_node, followers_of


@dataclasses.dataclass(frozen=True)
class Move:
    """Put `start`, of a gather or of a copy from the host, right before `anchor`."""

    start: fx.Node
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class PrefetchPlan:
    """Moves in graph order."""

    moves: tuple[Move, ...]


class _Prefetch:
    """Does what either pass has planned."""

    def apply(self, step: StepGraph, plan: PrefetchPlan) -> None:
        """Moves the copies, each with its slice, and the gathers, each with the casts that it sends."""
        move(step.graph, with_what_is_sent(plan.moves))


@dataclasses.dataclass(frozen=True)
class SchedulePrefetch(_Prefetch):
    """The pass; a gather starts `distance` buckets ahead, with 0 where it is needed."""

    distance: int
    name = "schedule-prefetch"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> PrefetchPlan:
        """Finds the anchor of each gather."""
        order, top = step.order(), _top_of(step)
        gathers = list(step.nodes(Role.GATHER))
        first_waits = [_first_wait(gather, order) for gather in gathers]
        anchors = [*[top] * min(self.distance, len(gathers)), *first_waits]
        return _planned(step, anchors[: len(gathers)])


@dataclasses.dataclass(frozen=True)
class ScheduleFSDP1(_Prefetch):
    """The pass; see the module's docstring."""

    forward: Ahead
    backward: Ahead
    name = "schedule-fsdp1"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> PrefetchPlan:
        """Finds the anchor of each gather that moves."""
        rule = self.forward if step.phase is Phase.FORWARD else self.backward
        if rule is Ahead.AT_NEED:
            return PrefetchPlan(())
        return _planned(step, _anchors(step, rule))


def _planned(step: StepGraph, anchors: Sequence[fx.Node | None]) -> PrefetchPlan:
    """Each gather starts at its anchor, if it has one, and what the next one sends is copied there."""
    gathers, order = list(step.nodes(Role.GATHER)), step.order()
    moves: list[Move] = []
    for k, (gather, anchor) in enumerate(zip(gathers, anchors, strict=True)):
        here = anchor or _first_sent(gather, order)
        ahead = gathers[k + 1 : k + 2] if k or anchor is None else gathers[:2]
        moves += [Move(copy, here) for each in ahead for copy in copies_to(each)]
        moves += [] if anchor is None else [Move(gather, anchor)]
    return PrefetchPlan((*moves, *lone_copies(step)))


def _anchors(step: StepGraph, rule: Ahead) -> list[fx.Node | None]:
    """The node before which each gather starts; `None` for one that stays."""
    gathers, order = list(step.nodes(Role.GATHER)), step.order()
    if rule is Ahead.AT_ONCE:
        return [_top_of(step)] * len(gathers)
    before = gathers[:-1]
    if rule is Ahead.BEFORE_COMPUTE:
        return [None, *(_first_wait(gather, order) for gather in before)][: len(gathers)]
    reductions = [chain[0] for chain in chains_of(followers_of(step))]
    shared = [aliases(waits_of(gather)) for gather in before]
    last_uses = [last_of([*nodes, *(user for node in nodes for user in node.users)], order) for nodes in shared]
    # A bucket that leaves the graph is never freed.
    freed = [last if last is step.output else last.next for last in last_uses]
    anchors: list[fx.Node | None] = [None]
    for k, gather in enumerate(before):
        mine = set(require(gather).claims)
        reduced = [first_message_node(node) for node in reductions if not mine.isdisjoint(require(node).claims)]
        computed = last_of([freed[k], *reduced], order)
        need = order[_first_sent(gathers[k + 1], order)]
        # Buckets before that one may be freed later than it: a root's norms, which a whole block reads.
        later = [node for node in (computed, *freed[:k]) if order[node] < need]
        anchors.append(last_of(later, order) if computed in later else None)
    return anchors[: len(gathers)]


def _top_of(step: StepGraph) -> fx.Node:
    """The first node of a graph that sends nothing."""
    return next(n for n in step.graph.nodes if n.op != "placeholder" and role_of(n) not in (*SENT, Role.GATHER))


def _first_sent(gather: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    return first_of([*upstream(gather, *SENT), gather], order)


def _first_wait(gather: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    return first_of(waits_of(gather), order)


def with_what_is_sent(moves: Iterable[Move]) -> Iterator[tuple[list[fx.Node], fx.Node]]:
    """What moves in each, and where to."""
    return ((with_needs(one.start, one.anchor), one.anchor) for one in moves)


def copies_to(gather: fx.Node) -> list[fx.Node]:
    """Starts of the copies from the host that a gather sends."""
    return [node for node in upstream(gather, *SENT) if role_of(node) is Role.OFFLOAD_IN]


def lone_copies(step: StepGraph) -> list[Move]:
    """Moves of the copies that no gather sends to where the unit ahead of their own waits for its first copy."""
    units: dict[str, list[fx.Node]] = {}
    for copy in step.nodes(Role.OFFLOAD_IN):
        if require(copy).specs[0].size == 1:
            units.setdefault(require(copy).unit, []).append(copy)
    waits = [next(iter(copies[0].users)) for copies in units.values()]
    # The first two units are copied before the first wait: no unit runs ahead of the first one.
    anchors = [*waits[:1], *waits]
    return [Move(copy, a) for copies, a in zip(units.values(), anchors, strict=False) for copy in copies]
