"""The pipeline: everything that happens to a graph, in order.

Dynamo's graph: one `fsdp.unshard` marker per read of a parameter           parameters/reads.py
1. capture: AOTAutograd makes the joint graph; its flat shards are named    capture/inputs.py
2. partition: forward and backward; gathered parameters are never saved     capture/partition.py
3. passes: the list below, on either graph                                  passes/
4. verify: the rules that every graph must keep                             verify/
5. lower: Inductor, or operator by operator                                 lower/
"""

from __future__ import annotations

from typing import Any

from fsdp_compile.artifacts import Watcher
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.options import FSDPOptions
from fsdp_compile.passes.base import GraphPass
from fsdp_compile.passes.bucket import BucketCollectives
from fsdp_compile.passes.insert_collectives import InsertCollectives
from fsdp_compile.passes.schedule_prefetch import SchedulePrefetch
from fsdp_compile.passes.schedule_reduce import ScheduleReduce
from fsdp_compile.passes.schedule_reshard import ScheduleReshard
from fsdp_compile.verify.check import check
from fsdp_compile.verify.limits import Limits


def passes(options: FSDPOptions) -> tuple[GraphPass[Any], ...]:
    """The passes in the order in which they run."""
    return (
        InsertCollectives(),
        BucketCollectives(),
        SchedulePrefetch(distance=options.prefetch),
        ScheduleReduce(),
        ScheduleReshard(),
    )


def transform(step: StepGraph, options: FSDPOptions) -> StepGraph:
    """Runs all passes on one graph in place, verifies it and returns it.

    Raises:
        InvariantError: If the result breaks a rule of `verify/`.
    """
    watcher = Watcher(options.artifacts)
    watcher.captured(step)
    for graph_pass in passes(options):
        plan = graph_pass.plan(step)
        watcher.planned(step, graph_pass, plan)
        graph_pass.apply(step, plan)
        watcher.applied(step, graph_pass)
    check(step, after=graph_pass.name, limits=Limits(prefetch=options.prefetch))
    step.graph.lint()
    step.gm.recompile()
    return step
