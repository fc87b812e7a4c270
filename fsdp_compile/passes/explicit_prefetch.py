"""Starts the all-gathers that a module was told to prefetch where that module's own are complete.

    wait 0, compute 0, gather 1, wait 1, compute 1, gather 2, ...   ->   wait 0, gather 1, gather 2, compute 0, ...

for `layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])`. They start in the order of the list, wherever
another rule had put them; a unit that several modules name starts at the first of them. All other gathers stay.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.edit import move, with_needs
from fsdp_compile.ir.graph import DECLARING, Phase, Role, Stage, StepGraph, require
from fsdp_compile.ir.queries import last_of


@dataclasses.dataclass(frozen=True)
class Start:
    """Move `nodes`, a gather and what it sends, before `anchor`."""

    nodes: tuple[fx.Node, ...]
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class ExplicitPlan:
    """What starts where, in the order in which it starts."""

    starts: tuple[Start, ...]


class ExplicitPrefetch:
    """The pass; see the module's docstring."""

    name = "explicit-prefetch"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> ExplicitPlan:
        """Finds the place of each gather that a list names.

        Raises:
            ConfigError: If a list names a unit that the graph reads before the one with the list, or that it does not
                read. Gathers of other graphs can start where this one's first does (`fsdp2/pipeline.py`), so the list
                of its first unit may name these.
        """
        _refuse_wrong_lists(step)
        order = step.order()
        behind = _named(step, order)
        moved = {gather: with_needs(gather, last_wait) for gather, last_wait in behind.items()}
        moving = {node for nodes in moved.values() for node in nodes}
        starts = []
        for gather, nodes in moved.items():
            anchor = behind[gather].next
            while anchor in moving:
                anchor = anchor.next
            starts.append(Start(tuple(nodes), anchor))
        return ExplicitPlan(tuple(starts))

    def apply(self, step: StepGraph, plan: ExplicitPlan) -> None:
        """Moves the gathers, each with the casts that it sends, and with its copies from the host if they are later."""
        move(step.graph, ((start.nodes, start.anchor) for start in plan.starts))


def _lists_of(step: StepGraph) -> dict[str, tuple[str, ...]]:
    """What the units of a graph were told to prefetch in its phase; units without a list are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for node in step.nodes(*DECLARING):
        record = require(node)
        spec = record.specs[0]
        names = spec.forward_prefetch if step.phase is Phase.FORWARD else spec.backward_prefetch
        if names:
            number = record.unit.partition("#")[1:]  # of one of several models whose units have the same names
            found[record.unit] = tuple(name + "".join(number) for name in names)
    return found


def _named(step: StepGraph, order: dict[fx.Node, int]) -> dict[fx.Node, fx.Node]:
    """The all-gathers that lists name, in the order of their starts, each with the wait behind which it starts.

    The first unit to name one starts it.
    """
    lists = _lists_of(step)
    waits = {gather: last_of(waits_of(gather), order) for gather in (step.nodes(Role.GATHER) if lists else ())}
    by_need = sorted(waits, key=lambda gather: order[waits[gather]])
    found: dict[fx.Node, fx.Node] = {}
    for place, by in enumerate(by_need):
        for unit in require(by).units:
            for name in lists.get(unit, ()):
                # A unit that is already in use, or was resharded, at this point needs no prefetch.
                for gather in by_need[place + 1 :]:
                    if name in require(gather).units and unit not in require(gather).units:
                        found.setdefault(gather, waits[by])
    return found


def _refuse_wrong_lists(step: StepGraph) -> None:
    lists, order = _lists_of(step), step.order()
    needs: dict[str, list[int]] = {}
    for full in step.nodes(Role.FULL):  # its unit may share the gather of another one, which is needed earlier
        needs.setdefault(require(full).unit, []).append(order[full])
    read = {require(node).unit for node in step.nodes(*DECLARING)}
    gathered = [require(gather).units for gather in step.nodes(Role.GATHER)]
    at_the_start = next(iter(gathered), ())
    for unit, names in lists.items():
        for name in names if unit in needs and any(unit in units for units in gathered) else ():
            # In backward a unit may have no read although forward has one: nothing needs its parameters there.
            if name not in read and unit not in at_the_start and step.phase is Phase.FORWARD:
                what = "which its graph does not read"
                instead = "a list of the first unit that the graph reads, or no graph break in between"
            elif name in needs and max(needs[name]) < min(needs[unit]):
                what, instead = "which is needed before it", "modules that run after it"
            else:
                continue
            where = f"set_modules_to_{step.phase.value}_prefetch() of {unit}"
            raise ConfigError(f"{unit} is told to prefetch {name}, {what}", where=where, instead=instead)
