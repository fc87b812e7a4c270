"""Starts all-gathers by FSDP1's rules.

BACKWARD_PRE, and forward prefetch: where the bucket before it is waited for, so that both are unsharded while it
computes.

    wait 1, compute 1, reduce 1, gather 0, wait 0   ->   gather 0, wait 1, compute 1, reduce 1, wait 0

BACKWARD_POST: where each bucket is freed that is freed before it is needed, and the gradients of the one before it are
ready, ahead of their reduction on the link.

    wait 1, compute 1, reduce 1, gather 0, wait 0   ->   wait 1, compute 1, gather 0, reduce 1, wait 0

Nothing starts ahead of the first bucket, which is gathered where it is needed; without a limit all start at the top.
Copies from the host start one bucket before the gather that sends them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from fsdp_compile.config.prefetch import Ahead
from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.ir.edit import move
from fsdp_compile.ir.graph import SENT, Phase, Role, Stage, StepGraph, require
from fsdp_compile.ir.queries import aliases, first_of, last_of, upstream
from fsdp_compile.passes.schedule_prefetch import (
    CopyMove,
    Move,
    PrefetchPlan,
    copies_to,
    first_wait,
    lone_copies,
    top_of,
    with_what_is_sent,
)
from fsdp_compile.passes.schedule_reduce import chains_of, first_message_node, followers_of


@dataclasses.dataclass(frozen=True)
class ScheduleFSDP1:
    """The pass; see the module's docstring."""

    forward: Ahead = Ahead.AT_NEED
    backward: Ahead = Ahead.BEFORE_COMPUTE
    name = "schedule-fsdp1"
    stage = Stage.BUCKETED

    def plan(self, step: StepGraph) -> PrefetchPlan:
        """Finds the anchor of each gather that moves."""
        rule = self.forward if step.phase is Phase.FORWARD else self.backward
        if rule is Ahead.AT_NEED:
            return PrefetchPlan(())
        order = step.order()
        gathers = list(step.nodes(Role.GATHER))
        anchors = _anchors(step, rule, gathers, order)
        moves: list[Move | CopyMove] = []
        for k, (gather, anchor) in enumerate(zip(gathers, anchors, strict=True)):
            here = anchor or first_of([*upstream(gather, *SENT), gather], order)
            ahead = gathers[k + 1 : k + 2] if k or anchor is None else gathers[:2]
            moves += [CopyMove(copy, here) for each in ahead for copy in copies_to(each)]
            moves += [Move(gather, anchor)] if anchor is not None else []
        return PrefetchPlan((*moves, *lone_copies(step)))

    def apply(self, step: StepGraph, plan: PrefetchPlan) -> None:
        """Moves the copies, each with its slice, and the gathers, each with the casts that it sends."""
        move(step.graph, with_what_is_sent(plan.moves))


def _anchors(
    step: StepGraph, rule: Ahead, gathers: Sequence[fx.Node], order: dict[fx.Node, int]
) -> list[fx.Node | None]:
    """The node before which each gather starts; `None` for one that stays."""
    if rule is Ahead.AT_ONCE:
        return [top_of(step)] * len(gathers)
    before = gathers[:-1]
    if rule is Ahead.BEFORE_COMPUTE:
        return [None, *(first_wait(gather, order) for gather in before)][: len(gathers)]
    reductions = [chain[0] for chain in chains_of(followers_of(step))]
    needs = [first_of([*upstream(gather, *SENT), gather], order) for gather in gathers]
    freed = [_freed(step, gather, order) for gather in before]
    anchors: list[fx.Node | None] = [None]
    for k, gather in enumerate(before):
        computed = _computed(gather, freed[k], reductions, order)
        # Buckets before that one may be freed later than it: a root's norms, which a whole block reads.
        later = [node for node in (computed, *freed[:k]) if order[node] < order[needs[k + 1]]]
        anchors.append(last_of(later, order) if computed in later else None)
    return anchors[: len(gathers)]


def _freed(step: StepGraph, gather: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The first node after the last use of a bucket; the output if the bucket leaves the graph and is never freed."""
    shared = aliases(waits_of(gather))
    last = last_of([*shared, *(user for node in shared for user in node.users)], order)
    return last if last is step.output else last.next


def _computed(gather: fx.Node, freed: fx.Node, reductions: Sequence[fx.Node], order: dict[fx.Node, int]) -> fx.Node:
    """Where a bucket is freed, or what begins the last reduction of its gradients if that is later."""
    mine = set(require(gather).claims)
    reduced = [first_message_node(node) for node in reductions if not mine.isdisjoint(require(node).claims)]
    return last_of([freed, *reduced], order)
