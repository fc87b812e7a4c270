"""Gathers that the user started: the units that a module was told to prefetch."""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import last_of
from fsdp_compile.ir.record import DECLARING, Phase, Role, require, role_of

Lists = dict[str, tuple[str, ...]]
"""For each unit, those that it was told to prefetch."""


@dataclasses.dataclass(frozen=True)
class Named:
    """`gather` starts where what `by` has gathered is used first."""

    gather: fx.Node
    by: fx.Node


def lists_of(step: StepGraph) -> Lists:
    """What the units of a graph were told to prefetch in its phase; units without a list are left out."""
    found: Lists = {}
    for node in step.nodes(*DECLARING):
        record = require(node)
        spec = record.specs[0]
        names = spec.forward_prefetch if step.phase is Phase.FORWARD else spec.backward_prefetch
        if names:
            number = record.unit.partition("#")[1:]  # of one of several models whose units have the same names
            found[record.unit] = tuple(name + "".join(number) for name in names)
    return found


def named_gathers(step: StepGraph) -> list[Named]:
    """The gathers that lists name, in the order in which they start; the first unit to name one starts it.

    A unit that is not gathered in the graph, and one that is in use or was freed when it is named, is left out.
    """
    lists = lists_of(step)
    if not lists:
        return []
    order = step.order()
    need = {gather: order[last_wait(gather, order)] for gather in step.nodes(Role.GATHER)}
    found: dict[fx.Node, Named] = {}
    for by in sorted(need, key=need.__getitem__):
        for unit in require(by).units:
            for name in lists.get(unit, ()):
                for gather in sorted(need, key=need.__getitem__):
                    units = require(gather).units
                    if name in units and unit not in units and need[gather] > need[by] and gather not in found:
                        found[gather] = Named(gather, by)
    return list(found.values())


def last_wait(gather: fx.Node, order: dict[fx.Node, int]) -> fx.Node:
    """The last wait for a message of a gather."""
    started = [gather, *(user for user in gather.users if role_of(user) is Role.GATHER_ITEM)]
    return last_of([u for s in started for u in s.users if role_of(u) is Role.GATHER_WAIT], order)
