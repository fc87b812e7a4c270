"""Starts collectives in the order of another rank's plan, where this rank has planned another one for its own sizes.

    this rank:  gather 0, compute 0, reduce 0, gather 1        the order to follow:  gather 0, gather 1, reduce 0
             -> gather 0, compute 0, gather 1, reduce 0

Nodes keep their order, except that what has to start before a collective comes before it, with all that it needs. That
is always possible: data flows in both graphs alike, and the other rank's is an order in which it can. Which parameters
share a collective follows from the same lines (`passes/bucketing/follow_lines.py`).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise

from torch import fx

from fsdp_compile.cost.own_collectives import is_own
from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.errors import RankMismatchError
from fsdp_compile.ir.calls import group_of, line_of, numbered, starts_of
from fsdp_compile.ir.graph import Role, Stage, StepGraph, role_of
from fsdp_compile.ir.queries import first_of, is_known_to_repeat, last_of, upstream
from fsdp_compile.ir.writes import tied_to_writes


class CannotFollowError(RankMismatchError):
    """A graph cannot start its collectives in an order that it was given."""


@dataclasses.dataclass(frozen=True)
class FollowPlan:
    """All nodes between the inputs and the output, in their new order."""

    order: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class FollowOrder:
    """The pass; see the module's docstring.

    Attributes:
        lines: The collectives in the order to follow, as `ir.calls.numbered` writes them.
    """

    lines: tuple[str, ...]
    name = "follow-order"
    stage = Stage.BUCKETED

    def plan(self, step: StepGraph) -> FollowPlan:
        """Orders the graph anew.

        Raises:
            CannotFollowError: If the graph does not have these collectives, or needs one for an earlier one.
        """
        wanted, order = self._wanted(step), step.order()
        before: dict[fx.Node, list[fx.Node]] = {}
        for first, later in (*pairwise(wanted), *pairwise(_in_place(step)), *_neighbours(wanted, order)):
            before.setdefault(later, []).append(first)
        return FollowPlan(tuple(_sorted(step, before, order)))

    def apply(self, step: StepGraph, plan: FollowPlan) -> None:
        """Moves the nodes."""
        for node in plan.order:
            step.output.prepend(node)

    def _wanted(self, step: StepGraph) -> list[fx.Node]:
        """The starts of the collectives, in the order to follow."""
        starts = list(starts_of(step))
        by_line: dict[str, deque[fx.Node]] = {}
        for line, node in zip(numbered([line_of(node) for node in starts]), starts, strict=True):
            by_line.setdefault(line, deque()).append(node)
        wanted = [by_line[line].popleft() for line in self.lines if by_line.get(line)]
        if len(wanted) != len(self.lines) or len(wanted) != len(starts):
            raise _cannot_follow(step)
        return wanted


def _in_place(step: StepGraph) -> list[fx.Node]:
    """The program's nodes that write, read what is written, may draw random numbers or send: they keep their order."""
    tied = tied_to_writes(step.graph)
    return [
        node
        for node in step.graph.nodes
        if node.op == "call_function"
        and role_of(node) is None
        and (node in tied or node.is_impure() or is_own(node) or not is_known_to_repeat(node.target))
    ]


def _neighbours(wanted: Sequence[fx.Node], order: dict[fx.Node, int]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What else follows from the order of the starts: waits, reads and gradients have the same (rule plan-order).

    Yields:
        A node, and one that comes behind it.
    """
    by_group: dict[tuple[Role | None, str], list[fx.Node]] = {}
    for start in wanted:
        by_group.setdefault((role_of(start), group_of(start)), []).append(start)
    for (role, _), starts in by_group.items():
        for first, later in pairwise(starts):
            for wait in waits_of(later):
                yield from ((earlier, wait) for earlier in waits_of(first))
            if role in (Role.REDUCE, Role.REPLICATE):
                yield first, last_of(_gradients_of(later), order)
            elif role is Role.GATHER and (readers := _readers_of(first)) and (later_ones := _readers_of(later)):
                yield first_of(readers, order), first_of(later_ones, order)


def _gradients_of(start: fx.Node) -> set[fx.Node]:
    made = [start, *upstream(start, Role.GRADIENT)]
    return {node for one in made for node in one.all_input_nodes if role_of(node) is not Role.GRADIENT}


def _readers_of(start: fx.Node) -> list[fx.Node]:
    return [user for wait in waits_of(start) for user in wait.users]


def _sorted(
    step: StepGraph, before: Mapping[fx.Node, Sequence[fx.Node]], order: Mapping[fx.Node, int]
) -> list[fx.Node]:
    """Graph order, with what `before` says, and what that needs, in front of each node."""
    done: dict[fx.Node, None] = {}
    for node in step.graph.nodes:
        needs = _needs(node, before, done)
        missing = {one: len(others) for one, others in needs.items()}
        needed_by: dict[fx.Node, list[fx.Node]] = {}
        for one, others in needs.items():
            for other in others:
                needed_by.setdefault(other, []).append(one)
        ready = [(order[one], one) for one, count in missing.items() if not count]
        heapq.heapify(ready)
        while ready:
            _, one = heapq.heappop(ready)
            done[one] = None
            for user in needed_by.get(one, ()):
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (order[user], user))
        if any(missing.values()):
            raise _cannot_follow(step)
    return [node for node in done if node.op not in ("placeholder", "output")]


def _needs(
    node: fx.Node, before: Mapping[fx.Node, Sequence[fx.Node]], done: Container[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    """A node and all that has to come before it and is not done, each with what it waits for."""
    found: dict[fx.Node, list[fx.Node]] = {}
    todo = [] if node in done else [node]
    while todo:
        one = todo.pop()
        if one not in found:
            found[one] = [n for n in dict.fromkeys((*one.all_input_nodes, *before.get(one, ()))) if n not in done]
            todo += found[one]
    return found


def _cannot_follow(step: StepGraph) -> CannotFollowError:
    return CannotFollowError(
        f"the {step.phase.value} graph of this rank cannot start its collectives in the order of another rank's",
        where="options={'prefetch': 'auto'}, by which each rank plans for the sizes of its own batch",
        instead="options={'prefetch': 1}, whose plan does not depend on sizes",
    )
