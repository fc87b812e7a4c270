"""Marks where each gathered bucket is freed: right after its last use.

    %y = mm(%x, %w)   ->   %y = mm(%x, %w); fsdp_compile.reshard([%gathered_w])

A bucket whose memory leaves the graph (the model returns a parameter, or it stays unsharded for backward on request) is
not freed.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile.cost.timeline import waits_of
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Record, Role, Stage, StepGraph, require
from fsdp_compile.ir.queries import aliases, last_of
from fsdp_compile.ops.effects import RESHARD


@dataclasses.dataclass(frozen=True)
class Release:
    """Free `messages` right after `last_use`."""

    messages: tuple[fx.Node, ...]
    last_use: fx.Node
    record: Record


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """Where buckets are freed, and the gathers whose memory leaves the graph."""

    releases: tuple[Release, ...]
    kept: tuple[fx.Node, ...]


class ScheduleReshard:
    """The pass; see the module's docstring."""

    name = "schedule-reshard"
    requires, ensures = Stage.BUCKETED, Stage.FINAL

    def plan(self, step: StepGraph) -> ReshardPlan:
        """Finds the last use of each bucket."""
        order = step.order()
        releases, kept = [], []
        for gather in step.nodes(Role.GATHER):
            waits = waits_of(gather)
            shared = aliases(waits)
            users = {user for node in shared for user in node.users}
            if step.output in users:
                kept.append(gather)
                continue
            record = dataclasses.replace(require(gather), role=Role.RESHARD)
            releases.append(Release(tuple(waits), last_of([*users, *shared], order), record))
        return ReshardPlan(tuple(releases), tuple(kept))

    def apply(self, step: StepGraph, plan: ReshardPlan) -> None:
        """Inserts the markers."""
        for release in plan.releases:
            b = GraphBuilder(step.graph, release.record, release.last_use)
            with step.graph.inserting_after(release.last_use):
                b.call(RESHARD, list(release.messages))
