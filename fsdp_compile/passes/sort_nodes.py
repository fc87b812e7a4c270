"""Sorts nodes so that some come before others, with the least change to an order: what has to come first is moved up.

    a, b, c, d    with c before b    ->    a, c, b, d

The order in which collectives start has such pairs: waits, reads and gradients follow it (rule plan-order).
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from torch import fx

from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.ir.calls import group_of
from fsdp_compile.ir.graph import Role, role_of
from fsdp_compile.ir.queries import first_of, last_of, upstream


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
                yield first, last_of(_gradients_of(later), order)
            elif role is Role.GATHER and (readers := _readers_of(first)):
                earliest = first_of(readers, order)
                yield from ((earliest, reader) for reader in _readers_of(later) if reader is not earliest)


def _gradients_of(start: fx.Node) -> set[fx.Node]:
    made = [start, *upstream(start, Role.GRADIENT)]
    return {node for one in made for node in one.all_input_nodes if role_of(node) is not Role.GRADIENT}


def _readers_of(start: fx.Node) -> list[fx.Node]:
    return [user for wait in waits_of(start) for user in wait.users]


def sort_nodes(nodes: Sequence[fx.Node], pairs: Iterable[tuple[fx.Node, fx.Node]]) -> list[fx.Node] | None:
    """The nodes of a graph in the order given, except that what has to come before a node comes before it.

    Args:
        nodes: All nodes, in an order that data flow need not allow.
        pairs: A node, and one that comes behind it.

    Returns:
        The order; `None` if there is none, since pairs and data flow contradict one another.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    for first, later in pairs:
        before.setdefault(later, []).append(first)
    order = {node: place for place, node in enumerate(nodes)}
    done: dict[fx.Node, None] = {}
    for node in nodes:
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
            return None
    return list(done)


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
