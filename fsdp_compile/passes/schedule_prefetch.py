"""Starts each all-gather early: while the bucket before it computes.

    wait 0, compute 0, gather 1, wait 1, compute 1   ->   gather 1, wait 0, compute 0, wait 1, compute 1

A gather is moved before the wait of the bucket that is `distance` before it, so at most `distance + 1` buckets are
gathered at once. The first ones start at the top of the graph. Only starts are moved, in the order they had.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile.ir.edit import move_before
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import first_of, upstream
from fsdp_compile.ir.record import SENT, Role, role_of


@dataclasses.dataclass(frozen=True)
class Move:
    """Start `gather` right before `anchor`."""

    gather: fx.Node
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class PrefetchPlan:
    """Moves in graph order."""

    moves: tuple[Move, ...]


@dataclasses.dataclass(frozen=True)
class SchedulePrefetch:
    """The pass; see the module's docstring.

    Attributes:
        distance: How many buckets ahead a gather starts; 0 leaves it where it is needed.
    """

    distance: int = 1
    name = "schedule-prefetch"

    def plan(self, step: StepGraph) -> PrefetchPlan:
        """Finds the anchor of each gather."""
        if self.distance == 0:
            return PrefetchPlan(())
        gathers = list(step.nodes(Role.GATHER))
        order = step.order()
        top = next(n for n in step.graph.nodes if n.op != "placeholder" and role_of(n) not in (*SENT, Role.GATHER))
        anchors = [
            top if k < self.distance else first_wait(gathers[k - self.distance], order) for k in range(len(gathers))
        ]
        return PrefetchPlan(tuple(Move(g, a) for g, a in zip(gathers, anchors, strict=True)))

    def apply(self, step: StepGraph, plan: PrefetchPlan) -> None:  # noqa: ARG002
        """Moves the gathers, each with the slices and casts that it sends."""
        for move in plan.moves:
            move_before([*upstream(move.gather, *SENT), move.gather], move.anchor)


def first_wait(gather: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The first wait for any message of a gather."""
    started = [gather, *(user for user in gather.users if role_of(user) is Role.GATHER_ITEM)]
    return first_of([u for s in started for u in s.users if role_of(u) is Role.GATHER_WAIT], order)
