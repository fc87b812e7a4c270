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
from fsdp_compile.ir.queries import first_of, upstream
from fsdp_compile.ir.record import Role, role_of

_FOLLOWERS = (Role.REDUCE_WAIT, Role.REPLICATE, Role.REPLICATE_WAIT, Role.SHARD_GRADIENT, Role.FLAT_GRADIENT)


@dataclasses.dataclass(frozen=True)
class Deferral:
    """Wait for `reduce` (and do what follows) right before `anchor`."""

    reduce: fx.Node
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
        order = step.order()
        anchors = [_sending(node, order) for node in reduces[1:]] + [step.output] * bool(reduces)
        return ReducePlan(tuple(Deferral(r, a) for r, a in zip(reduces, anchors, strict=True)))

    def apply(self, step: StepGraph, plan: ReducePlan) -> None:
        """Moves the waits, and everything of ours that follows from them."""
        for deferral in plan.deferrals:
            move_before(_followers(step, deferral.reduce), deferral.anchor)


def _sending(reduce: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The first node that builds the messages of a reduction: waiting before it frees memory for them."""
    return first_of([*_own_messages(reduce), reduce], order)


def _own_messages(reduce: fx.Node) -> list[fx.Node]:
    """The last unbroken run of message-building nodes right before a reduction."""
    run = []
    built = set(upstream(reduce, Role.GRADIENT))
    node = reduce.prev
    while node in built:
        run.append(node)
        node = node.prev
    return run


def _followers(step: StepGraph, reduce: fx.Node) -> list[fx.Node]:
    found: set[fx.Node] = set()
    todo = [reduce]
    while todo:
        for user in todo.pop().users:
            if user not in found and role_of(user) in (*_FOLLOWERS, Role.REDUCE_ITEM):
                found.add(user)
                todo.append(user)
    ready = [n for n in step.graph.nodes if n in found and role_of(n) in _FOLLOWERS]
    return [n for n in ready if _is_available(n, found, reduce)]


def _is_available(node: fx.Node, found: set[fx.Node], reduce: fx.Node) -> bool:
    """Whether a follower needs nothing of a later reduction (a flat gradient may wait for two)."""
    return all(
        source in found or source is reduce or role_of(source) not in (*_FOLLOWERS, Role.REDUCE_ITEM)
        for source in node.all_input_nodes
    )
