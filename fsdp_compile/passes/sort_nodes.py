"""Sorts nodes so that some come before others, with the least change to an order: what has to come first is moved up.

    a, b, c, d    with c before b    ->    a, c, b, d

The order in which collectives start has such pairs: waits, reads and gradients follow it (rule plan-order).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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

    Args:
        nodes: All nodes, in an order that data flow need not allow.
        pairs: A node, and one that comes behind it.

    Returns:
        The order; `None` if there is none, since pairs and data flow contradict one another.
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
