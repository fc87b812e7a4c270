"""Waits for each reduce-scatter late: right before the next one starts, the last one at the end of the graph.

    reduce 1, wait 1, compute 0, reduce 0, wait 0   ->   reduce 1, compute 0, wait 1, reduce 0, wait 0

So the reduction of one bucket runs beside the computation of the next one's gradients, and at most one bucket's full
gradients are on the wire.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile.ir.edit import move_before
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import last_of, upstream
from fsdp_compile.ir.record import Role, role_of

_FOLLOWERS = (Role.REDUCE_WAIT, Role.REPLICATE, Role.REPLICATE_WAIT, Role.SHARD_GRADIENT, Role.FLAT_GRADIENT)


@dataclasses.dataclass(frozen=True)
class Deferral:
    """Move what follows from `reduce` (its waits and what is made of them), in graph order, before `anchor`."""

    reduce: fx.Node
    followers: tuple[fx.Node, ...]
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """Deferrals in graph order."""

    deferrals: tuple[Deferral, ...]


class ScheduleReduce:
    """The pass; see the module's docstring."""

    name = "schedule-reduce"

    def plan(self, step: StepGraph) -> ReducePlan:
        """Finds the next reduction after each."""
        reduces = list(step.nodes(Role.REDUCE))
        followers = _followers(step)
        anchors = [_first_message_node(node) for node in reduces[1:]] + [step.output] * bool(reduces)
        return ReducePlan(
            tuple(Deferral(r, tuple(followers[r]), a) for r, a in zip(reduces, anchors, strict=True)),
        )

    def apply(self, step: StepGraph, plan: ReducePlan) -> None:  # noqa: ARG002
        """Moves the followers."""
        for deferral in plan.deferrals:
            move_before(deferral.followers, deferral.anchor)


def _followers(step: StepGraph) -> dict[fx.Node, list[fx.Node]]:
    """What can be done once a reduction has completed and none of the later ones has, in graph order."""
    order = step.order()
    latest: dict[fx.Node, fx.Node] = {}
    followers: dict[fx.Node, list[fx.Node]] = {}
    for node in step.graph.nodes:
        if role_of(node) is Role.REDUCE:
            latest[node] = node
            followers[node] = []
        elif role_of(node) in (Role.REDUCE_ITEM, *_FOLLOWERS):
            reduces = [latest[source] for source in node.all_input_nodes if source in latest]
            if reduces:
                latest[node] = last_of(reduces, order)
                if role_of(node) in _FOLLOWERS:
                    followers[latest[node]].append(node)
    return followers


def _first_message_node(reduce: fx.Node) -> fx.Node:
    """The first of the nodes that stand right before a reduction and build its messages.

    Waiting before them frees the gradients of the reduction before while these messages are built.
    """
    built = set(upstream(reduce, Role.GRADIENT))
    first = reduce
    while first.prev in built:
        first = first.prev
    return first
