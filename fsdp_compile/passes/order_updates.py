"""Moves updates behind the last node that reads their flat shard, where a schedule has put them before it.

    reduce %w, wait, fsdp.update(%flat, ...), gather %w   ->   reduce %w, wait, gather %w, wait, fsdp.update(%flat, ...)

Schedules move an update with the reduction that it follows. Where the gradient of a layer's input is computed after
that of its weight, the weight is gathered, or read in place, after its reduction has started.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile.ir.edit import move_after
from fsdp_compile.ir.graph import Role, StepGraph
from fsdp_compile.ir.queries import last_of, readers


@dataclasses.dataclass(frozen=True)
class Settled:
    """Move `update` right behind `anchor`."""

    update: fx.Node
    anchor: fx.Node


@dataclasses.dataclass(frozen=True)
class SettlePlan:
    """The updates that come too early."""

    moves: tuple[Settled, ...]


class SettleUpdates:
    """The pass; see the module's docstring."""

    name = "settle-updates"

    def plan(self, step: StepGraph) -> SettlePlan:
        """Compares each update with the last node that reads its flat shard."""
        order = step.order()
        found = []
        for update in step.nodes(Role.UPDATE):
            flat = update.args[0]
            assert isinstance(flat, fx.Node)
            anchor = last_of([update, *readers(flat)], order)
            if anchor is not update:
                found.append(Settled(update, anchor))
        return SettlePlan(tuple(found))

    def apply(self, step: StepGraph, plan: SettlePlan) -> None:  # noqa: ARG002
        """Moves them."""
        for one in plan.moves:
            move_after([one.update], one.anchor)
