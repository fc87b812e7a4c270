"""Starts collectives in the order of another rank's plan, where this rank has planned another one for its own sizes.

    this rank:  gather 0, compute 0, reduce 0, gather 1        the order to follow:  gather 0, gather 1, reduce 0
             -> gather 0, compute 0, gather 1, reduce 0

Nodes keep their order, except that what has to start before a collective comes before it, with all that it needs. That
is possible where data flows in both graphs alike. Which parameters share a collective follows from the same lines.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from torch import fx

from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.errors import RankMismatchError
from fsdp_compile.ir.calls import group_of, line_of, names_in, numbered, operator_in, starts_of
from fsdp_compile.ir.edit import move
from fsdp_compile.ir.graph import Role, Stage, StepGraph, role_of
from fsdp_compile.ir.queries import first_of, kept_order, last_of, upstream
from fsdp_compile.passes.bucketing.messages import ParamCollective


class CannotFollowError(RankMismatchError):
    """A graph cannot start its collectives in an order that it was given."""


@dataclasses.dataclass(frozen=True)
class NewOrder:
    """All nodes between the inputs and the output, in their new order; none if nothing changes."""

    order: tuple[fx.Node, ...]


class Reorders:
    """Does what a pass has planned that orders a graph anew."""

    def apply(self, step: StepGraph, plan: NewOrder) -> None:
        """Moves the nodes."""
        move(step.graph, [(plan.order, step.output)])


@dataclasses.dataclass(frozen=True)
class FollowOrder(Reorders):
    """The pass; see the module's docstring."""

    lines: tuple[str, ...]  # the collectives in the order to follow, as `ir.calls.numbered` writes them
    name = "follow-order"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def group(self, step: StepGraph, singles: Iterable[ParamCollective]) -> list[list[ParamCollective]]:
        """The parameters of each collective, in the order of its messages, of a graph that has one for each parameter.

        Raises:
            CannotFollowError: If the lines have no place for one of them.
        """
        keys_of = enumerate(_keys(self.lines))
        places = {key: (line, place) for line, keys in keys_of for place, key in enumerate(keys)}
        starts = list(starts_of(step))
        own = _keys(numbered([line_of(start) for start in starts]))
        place_of = {start: places.get(keys[0]) for start, keys in zip(starts, own, strict=True)}
        found: dict[int, list[tuple[int, ParamCollective]]] = {}
        for single in singles:
            if (at := place_of[single.start]) is None:
                raise cannot_follow(step)
            found.setdefault(at[0], []).append((at[1], single))
        return [[single for _, single in sorted(group, key=lambda at: at[0])] for group in found.values()]

    def plan(self, step: StepGraph) -> NewOrder:
        """Orders the graph anew.

        Raises:
            CannotFollowError: If the graph does not have these collectives, or needs one for an earlier one.
        """
        wanted, order = self._wanted(step), step.order()
        pairs = (*pairwise(wanted), *kept_order(step.graph), *neighbours(wanted, order))
        found = sort_nodes(list(step.graph.nodes), pairs)
        if found is None:
            raise cannot_follow(step)
        return NewOrder(tuple(node for node in found if node.op not in ("placeholder", "output")))

    def _wanted(self, step: StepGraph) -> list[fx.Node]:
        """The starts of the collectives, in the order to follow."""
        starts = list(starts_of(step))
        by_line: dict[str, deque[fx.Node]] = {}
        for line, node in zip(numbered([line_of(node) for node in starts]), starts, strict=True):
            by_line.setdefault(line, deque()).append(node)
        wanted = [by_line[line].popleft() for line in self.lines if by_line.get(line)]
        if len(wanted) != len(self.lines) or len(wanted) != len(starts):
            raise cannot_follow(step)
        return wanted


def _keys(lines: Sequence[str]) -> Iterator[list[tuple[str, str, int]]]:
    """For each line its parameters: operator, name, and which one of that name, which two models may have."""
    seen: Counter[tuple[str, str]] = Counter()
    for line in lines:
        operator = operator_in(line).removesuffix("_coalesced")
        keys = []
        for name in names_in(line):
            seen[operator, name] += 1  # one by one: a message may have two parameters of one name
            keys.append((operator, name, seen[operator, name]))
        yield keys


def cannot_follow(step: StepGraph) -> CannotFollowError:
    """The error for a graph and an order that was given to it."""
    return CannotFollowError(
        f"the {step.phase.value} graph of this rank cannot start its collectives in the order of another rank's",
        where="options={'prefetch': 'auto'}, by which each rank plans for the sizes of its own batch",
        instead="options={'prefetch': 1}, whose plan does not depend on sizes",
    )


def neighbours(wanted: Sequence[fx.Node], order: dict[fx.Node, int]) -> Iterator[tuple[fx.Node, fx.Node]]:
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
                made = [later, *upstream(later, Role.GRADIENT)]
                gradients = [n for one in made for n in one.all_input_nodes if role_of(n) is not Role.GRADIENT]
                yield first, last_of(gradients, order)
            elif role is Role.GATHER and (readers := _readers_of(first)):
                earliest = first_of(readers, order)
                yield from ((earliest, reader) for reader in _readers_of(later) if reader is not earliest)


def _readers_of(start: fx.Node) -> list[fx.Node]:
    return [user for wait in waits_of(start) for user in wait.users]


def sort_nodes(nodes: Sequence[fx.Node], pairs: Iterable[tuple[fx.Node, fx.Node]]) -> list[fx.Node] | None:
    """The nodes of a graph in the order given, except that what has to come before a node comes before it.

    Data flow need not allow the order given. Each of `pairs` is a node, and one that comes behind it. `None` if data
    flow and they contradict one another.
    """
    order = {node: place for place, node in enumerate(nodes)}
    before: dict[fx.Node, list[fx.Node]] = {node: list(node.all_input_nodes) for node in nodes}
    for first, later in pairs:
        before[later].append(first)
    done: dict[fx.Node, None] = {}
    begun: set[fx.Node] = set()
    todo = list(reversed(nodes))
    while todo:
        node = todo[-1]
        missing = sorted((one for one in {*before[node]} if one not in done), key=order.__getitem__, reverse=True)
        if node in done or not missing:
            done[todo.pop()] = None
        elif node in begun:
            return None  # it is needed for what it needs
        else:
            begun.add(node)
            todo += missing
    return list(done)
