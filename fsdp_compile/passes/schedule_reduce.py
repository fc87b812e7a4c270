"""Waits for each reduction late: right before the next one starts, the last one at the end of the graph.

    reduce 1, wait 1, compute 0, reduce 0, wait 0   ->   reduce 1, compute 0, wait 1, reduce 0, wait 0

So the reduction of one bucket overlaps the computation of the next one's gradients, and at most one bucket's full
gradients are on the link. Where shards are averaged over replicas as well, an all-reduce starts as soon as its
reduce-scatter has completed, and is waited for before the next bucket's all-reduce starts:

    reduce 1, compute 0, wait 1, all-reduce 1, reduce 0, wait 0, wait 1, all-reduce 0, wait 0

A copy of gradients to the host starts once they are averaged, and is waited for before the next bucket's starts:

    reduce 1, compute 0, wait 1, copy 1, reduce 0, wait copy 1, wait 0, copy 0, wait copy 0
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from torch import fx

from fsdp_compile.ir.edit import move
from fsdp_compile.ir.graph import Role, Stage, StepGraph, role_of
from fsdp_compile.ir.queries import last_of, upstream
from fsdp_compile.passes.emit import STARTS

_ITEMS = (Role.REDUCE_ITEM, Role.REPLICATE_ITEM)

Followers = dict[fx.Node, list[fx.Node]]
"""For each collective of a reduction, what can be done once it has completed."""


@dataclasses.dataclass(frozen=True)
class Await:
    """Move what follows from `start` (its waits and everything downstream), in graph order, before `anchor`.

    It starts a collective, or where there is none a copy to the host.
    """

    start: fx.Node
    followers: tuple[fx.Node, ...]
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """Stage by stage, each in graph order: a later stage's collectives move with the earlier one's waits."""

    awaits: tuple[Await, ...]


class ScheduleReduce:
    """The pass; see the module's docstring."""

    name = "schedule-reduce"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> ReducePlan:
        """Finds the next collective of the same stage after each."""
        followers = followers_of(step)
        later = {node for following in followers.values() for node in following}
        stages = [n for n in followers if n not in later], [n for n in followers if n in later]
        awaits = itertools.chain(*(_awaits(stage, followers, step.output) for stage in stages))
        return ReducePlan((*awaits, *lone_waits(step, followers)))

    def apply(self, step: StepGraph, plan: ReducePlan) -> None:
        """Moves the followers; one that something else is needed for, which comes later, stays behind that."""
        move(step.graph, ((one.followers, one.anchor) for one in plan.awaits))


def _awaits(starts: Sequence[fx.Node], followers: Followers, end: fx.Node) -> list[Await]:
    anchors = [*map(first_message_node, starts[1:]), end]
    awaits: list[Await] = []
    before: tuple[fx.Node, ...] = ()
    for index, (start, anchor) in enumerate(zip(starts, anchors, strict=False)):
        if before:
            awaits.append(Await(starts[index - 1], before, anchor))
        behind, before = copies_apart(followers[start])
        awaits.append(Await(start, behind, anchor))
    return [*awaits, Await(starts[-1], before, end)] if before else awaits


def copies_apart(followers: Sequence[fx.Node]) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """What follows from a collective up to the start of a copy to the host, and the waits for that copy."""
    waits = {node for node in followers if role_of(node) is Role.OFFLOAD_OUT_WAIT}
    last = waits | {user for wait in waits for user in wait.users}
    return tuple(n for n in followers if n not in last), tuple(n for n in followers if n in last)


def lone_waits(step: StepGraph, followers: dict[fx.Node, list[fx.Node]]) -> list[Await]:
    """Moves of the waits for copies to the host that follow from no collective, to before the next such copy starts."""
    moved = {node for following in followers.values() for node in following}
    lone = [copy for copy in step.nodes(Role.OFFLOAD_OUT) if copy not in moved]
    waits = [next(user for user in copy.users if role_of(user) is Role.OFFLOAD_OUT_WAIT) for copy in lone]
    anchors = [*lone[1:], step.output]
    return [Await(c, (wait, *wait.users), a) for c, wait, a in zip(lone, waits, anchors, strict=False)]


def followers_of(step: StepGraph) -> Followers:
    """For each collective of a reduction, what can run once it has completed and no later one has, in order."""
    order = step.order()
    behind: dict[fx.Node, fx.Node] = {}
    followers: Followers = {}
    for node in step.graph.nodes:
        before = [s if s in followers else behind[s] for s in node.all_input_nodes if s in followers or s in behind]
        if role_of(node) in _ITEMS:  # it stays with its own collective
            (start,) = before
            behind[node] = start
            if start in behind:
                followers[behind[start]].append(node)
        elif before and node.op != "output":
            behind[node] = last_of(before, order)
            followers[behind[node]].append(node)
        if role_of(node) in STARTS:
            followers[node] = []
    return followers


def chains_of(followers: Followers) -> list[list[fx.Node]]:
    """The collectives of each reduction in order: a later stage starts among what follows from the one before."""
    later = {node for following in followers.values() for node in following}
    chains = [[start] for start in followers if start not in later]
    for chain in chains:
        while following := [node for node in followers[chain[-1]] if node in followers]:
            chain.append(following[0])
    return chains


def first_message_node(reduce: fx.Node) -> fx.Node:
    """The first of the nodes that stand right before a reduction and build its messages."""
    # A wait before these nodes frees the gradients of the reduction before while the messages are built.
    built = set(upstream(reduce, Role.GRADIENT))
    first = reduce
    while first.prev in built:
        first = first.prev
    return first
