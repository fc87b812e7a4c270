"""Moves updates behind the last node that reads their flat parameter, where a schedule has put them before it.

    reduce %w, wait, update(%flat, ...), gather %w -> reduce %w, wait, gather %w, wait, update(%flat, ...)

Schedules move an update with the reduction that it follows. Where the gradient of a layer's input is computed after
that of its weight, the weight is gathered, or read in place, after its reduction has started.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile.ir.edit import move_after
from fsdp_compile.ir.graph import Role, Stage, StepGraph
from fsdp_compile.ir.queries import last_of, readers


@dataclasses.dataclass(frozen=True)
class Ordered:
    """Move `update` right behind `anchor`."""

    update: fx.Node
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class OrderPlan:
    """The updates that come too early."""

    moves: tuple[Ordered, ...]


class OrderUpdates:
    """The pass; see the module's docstring."""

    name = "order-updates"
    stage = Stage.BUCKETED

    def plan(self, step: StepGraph) -> OrderPlan:
        """Compares each update with the last node that reads its flat parameter."""
        order = step.order()
        found = []
        for update in step.nodes(Role.UPDATE):
            flat = update.args[0]
            assert isinstance(flat, fx.Node)
            anchor = last_of([update, *readers(flat)], order)
            if anchor is not update:
                found.append(Ordered(update, anchor))
        return OrderPlan(tuple(found))

    def apply(self, step: StepGraph, plan: OrderPlan) -> None:  # noqa: ARG002
        """Moves the updates."""
        for one in plan.moves:
            move_after([one.update], one.anchor)
