"""Starts the all-gathers that a module was told to prefetch where that module's own are complete.

    wait 0, compute 0, gather 1, wait 1, compute 1, gather 2, ...   ->   wait 0, gather 1, gather 2, compute 0, ...

for `layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])`. They start in the order of the list, wherever
another rule had put them; a unit that several modules name starts at the first of them. All other gathers stay.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.edit import move, with_needs
from fsdp_compile.ir.graph import DECLARING, Phase, Role, Stage, StepGraph, require
from fsdp_compile.ir.queries import last_wait, lists_of, named_gathers


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
        named = named_gathers(step)
        _refuse_wrong_lists(step)
        order = step.order()
        after = {one: last_wait(one.by, order) for one in named}
        moved = {one: with_needs(one.gather, after[one]) for one in named}
        moving = {node for nodes in moved.values() for node in nodes}
        starts = []
        for one in named:
            anchor = after[one].next
            while anchor in moving:
                anchor = anchor.next
            starts.append(Start(tuple(moved[one]), anchor))
        return ExplicitPlan(tuple(starts))

    def apply(self, step: StepGraph, plan: ExplicitPlan) -> None:
        """Moves the gathers, each with the casts that it sends, and with its copies from the host if they are later."""
        move(step.graph, ((start.nodes, start.anchor) for start in plan.starts))


def _refuse_wrong_lists(step: StepGraph) -> None:
    lists = lists_of(step)
    order = step.order()
    needs: dict[str, list[int]] = {}
    for full in step.nodes(Role.FULL):  # its unit may share the gather of another one, which is needed earlier
        needs.setdefault(require(full).unit, []).append(order[full])
    read = {require(node).unit for node in step.nodes(*DECLARING)}
    first = next(step.nodes(Role.GATHER), None)
    at_the_start = () if first is None else require(first).units
    for unit, names in lists.items():
        for name in names if unit in needs else ():
            # In backward a unit may have no read although forward has one: nothing needs its parameters there.
            if name not in read and unit not in at_the_start and step.phase is Phase.FORWARD:
                raise _refusal(step, unit, f"{name}, which its graph does not read", _ELSEWHERE)
            if name in needs and max(needs[name]) < min(needs[unit]):
                raise _refusal(step, unit, f"{name}, which is needed before it", _LATER)


_ELSEWHERE = "a list of the first unit that the graph reads, or no graph break in between"
_LATER = "modules that run after it"


def _refusal(step: StepGraph, unit: str, what: str, instead: str) -> ConfigError:
    phase = step.phase.value
    return ConfigError(
        f"{unit} is told to prefetch {what}", where=f"set_modules_to_{phase}_prefetch() of {unit}", instead=instead
    )
