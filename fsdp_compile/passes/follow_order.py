"""Starts collectives in the order of another rank's plan, where this rank has planned another one for its own sizes.

    this rank:  gather 0, compute 0, reduce 0, gather 1        the order to follow:  gather 0, gather 1, reduce 0
             -> gather 0, compute 0, gather 1, reduce 0

Nodes keep their order, except that what has to start before a collective comes before it, with all that it needs. That
is always possible: data flows in both graphs alike, and the other rank's is an order in which it can.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import fx

from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.errors import RankMismatchError
from fsdp_compile.ir.calls import group_of, line_of, numbered, starts_of
from fsdp_compile.ir.graph import Role, Stage, StepGraph, role_of
from fsdp_compile.ir.queries import last_of, upstream
from fsdp_compile.ir.writes import tied_to_writes


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
            RankMismatchError: If the graph does not have these collectives, or needs one for an earlier one.
        """
        wanted, order = self._wanted(step), step.order()
        before: dict[fx.Node, list[fx.Node]] = {}
        for first, later in (*pairwise(wanted), *pairwise(_in_place(step)), *_of_reductions(wanted, order)):
            before.setdefault(later, []).append(first)
        return FollowPlan(tuple(_sorted(step, before)))

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
    """The program's nodes that write, read what is written, or draw random numbers: they keep their order."""
    tied = tied_to_writes(step.graph)
    return [
        node
        for node in step.graph.nodes
        if node.op == "call_function"
        and role_of(node) is None
        and (node in tied or node.is_impure() or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()))
    ]


def _of_reductions(wanted: Sequence[fx.Node], order: dict[fx.Node, int]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What else follows from the order of reductions: they are ready, and are waited for, in the order of their starts.

    Yields:
        A node, and one that comes behind it.
    """
    by_group: dict[tuple[Role | None, str], list[fx.Node]] = {}
    for start in wanted:
        by_group.setdefault((role_of(start), group_of(start)), []).append(start)
    for (role, _), starts in by_group.items():
        for first, later in pairwise(starts if role in (Role.REDUCE, Role.REPLICATE) else ()):
            made = [later, *upstream(later, Role.GRADIENT)]
            sources = {node for one in made for node in one.all_input_nodes if role_of(node) is not Role.GRADIENT}
            yield first, last_of(sources, order)
            for wait in waits_of(later):
                yield from ((earlier, wait) for earlier in waits_of(first))


def _sorted(step: StepGraph, before: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
    """Graph order, with what `before` says, and what that needs, in front of each node."""
    done: dict[fx.Node, None] = {}
    begun: set[fx.Node] = set()
    for node in step.graph.nodes:
        todo = [node]
        while todo:
            missing = [one for one in (*todo[-1].all_input_nodes, *before.get(todo[-1], ())) if one not in done]
            if not missing:
                done[todo.pop()] = None
            elif todo[-1] in begun and missing[0] in todo:
                raise _cannot_follow(step)
            else:
                begun.add(todo[-1])
                todo.append(missing[0])
    return [node for node in done if node.op not in ("placeholder", "output")]


def _cannot_follow(step: StepGraph) -> RankMismatchError:
    return RankMismatchError(
        f"the {step.phase.value} graph of this rank cannot start its collectives in the order of another rank's",
        where="options={'prefetch': 'auto'}, by which each rank plans for the sizes of its own batch",
        instead="options={'prefetch': 1}, whose plan does not depend on sizes",
    )
