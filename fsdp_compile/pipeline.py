"""The pipeline: everything that happens to a graph, in order.

Dynamo's graph: one `fsdp_compile.unshard` marker per read of a parameter           fsdp2/module_class.py
1. capture: AOTAutograd makes the joint graph; its parameter groups are named    capture/flat_inputs.py
2. partition: autocast's casts before gathers; forward and backward         partition/partition.py
3. keep: what stays unsharded for backward, if that is left open            partition/auto_reshard.py
4. passes: the list below, on either graph                                  passes/
5. verify: the rules that every graph must keep                             verify/
6. lower: Inductor, or operator by operator                                 lower/
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from fsdp_compile.artifacts import Watcher
from fsdp_compile.config.prefetch import Ahead, FSDPPrefetch
from fsdp_compile.cost.hardware import hardware as named_hardware
from fsdp_compile.cost.hardware import hardware_of
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import Phase, StepGraph
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.options import FSDPOptions
from fsdp_compile.partition.auto_reshard import keep_unsharded
from fsdp_compile.passes.base import GraphPass
from fsdp_compile.passes.bucket import BucketCollectives
from fsdp_compile.passes.delay_weight_gradients import DelayWeightGradients
from fsdp_compile.passes.explicit_prefetch import ExplicitPlan, ExplicitPrefetch
from fsdp_compile.passes.follow_order import FollowOrder
from fsdp_compile.passes.hide_own_collectives import HideOwnCollectives
from fsdp_compile.passes.insert_collectives import InsertCollectives
from fsdp_compile.passes.poison import poison_freed_messages
from fsdp_compile.passes.schedule_auto import MARGIN, ScheduleAuto, SchedulePlan
from fsdp_compile.passes.schedule_prefetch import ScheduleFSDP1, SchedulePrefetch
from fsdp_compile.passes.schedule_reduce import ScheduleReduce
from fsdp_compile.passes.schedule_reshard import ScheduleReshard
from fsdp_compile.passes.settings import FUSION, budget_bytes, for_graph, join_bytes, limits_of
from fsdp_compile.passes.update_in_backward import UpdateInBackward
from fsdp_compile.planner.problem import of_graphs
from fsdp_compile.verify.check import check

CAPTURE: Final = "capture"
"""`stop_after` before the first pass: the markers themselves gather and reduce."""

KINDS_OF_SCHEDULES: Final = ("auto", "BACKWARD_PRE", 1)
"""Values of `FSDPOptions.prefetch` that together run every pass."""


def passes(options: FSDPOptions, *, whole: bool = True) -> tuple[GraphPass[Any], ...]:
    """The passes in the order in which they run; `bucket_mb="auto"` depends on a graph, and joins no units here."""
    hardware = options.planned_for or named_hardware()
    bucket = BucketCollectives(
        hardware=hardware if options.prefetch == "auto" else None,
        whole=whole,
        reduce_layout=ReduceLayout(options.reduce_layout),
        join_bytes=join_bytes(options),
    )
    first = (InsertCollectives(), bucket, UpdateInBackward())
    last = (ExplicitPrefetch(), ScheduleReshard())
    if options.prefetch == 0:  # nothing overlaps: each unit is resharded before the next one is gathered
        return (*first, *last)
    if isinstance(options.prefetch, FSDPPrefetch):
        rules = ScheduleFSDP1(options.prefetch.in_forward, options.prefetch.in_backward)
        return (*first, rules, ScheduleReduce(), *last)
    if isinstance(options.prefetch, int):
        return (*first, SchedulePrefetch(options.prefetch), ScheduleReduce(), *last)
    fusion = FUSION[options.lower]
    # Delaying needs activations longer, which a budget may not have room for.
    delays = (HideOwnCollectives(hardware, fusion), DelayWeightGradients(hardware, fusion))
    delayed = () if options.memory_budget_gb is not None else delays
    schedule = ScheduleAuto(hardware, budget_bytes(options), fusion)
    return (*first, *delayed, schedule, *last)


def graphs_ahead(options: FSDPOptions, phase: Phase) -> int | None:
    """How many graphs of a model in several gather ahead of the one that runs; `None` for what fits."""
    if isinstance(options.prefetch, FSDPPrefetch):
        rule = options.prefetch.in_forward if phase is Phase.FORWARD else options.prefetch.in_backward
        return {Ahead.BEFORE_COMPUTE: 1, Ahead.AT_ONCE: sys.maxsize}.get(rule, 0)
    return options.prefetch if isinstance(options.prefetch, int) else None


def keep(forward: StepGraph, backward: StepGraph, options: FSDPOptions, *, whole: bool) -> tuple[str, ...]:
    """Leaves gathered parameters unsharded for backward where that is left open and a plan has room for them.

    Edits both graphs, which the passes have not seen, and returns the units that stay. Nothing stays unless the two are
    the whole model: several graphs would each use the memory of all.
    """
    if not whole or options.prefetch != "auto":
        return ()
    hardware = options.planned_for or hardware_of(forward)
    budget = budget_bytes(options)
    graph_bytes = None if budget is None else of_graphs(budget)
    return keep_unsharded(forward, backward, hardware, FUSION[options.lower], budget_bytes=graph_bytes, margin=MARGIN)


@contextmanager
def without_collections() -> Iterator[None]:
    """Turns automatic garbage collection off in the block.

    While Dynamo compiles, a full collection takes one to two seconds, and many new nodes bring several about: at 48
    layers 5 s of the 8 s that passes took. Nothing that is made of a graph before it is lowered is cyclic garbage.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@without_collections()
def transform(
    step: StepGraph,
    options: FSDPOptions,
    seen: Callable[[StepGraph], None] = lambda _: None,
    follow: Sequence[str] | None = None,
    *,
    whole: bool = True,
) -> StepGraph:
    """Runs all passes on one graph in place, verifies it and returns it; its module is not recompiled.

    Args:
        step: The graph.
        options: Of the compile.
        seen: Called with the graph once its collectives are inserted, and nothing is planned.
        follow: The collectives of a plan of another rank, in their order, that the graph has to keep.
        whole: Whether it is all of its model; else the collectives at its ends will run outside of it.

    Raises:
        ConfigError: If `options.stop_after` names no pass, or no schedule keeps `options.memory_budget_gb`.
        InvariantError: If the result breaks a rule of `verify/`.
        CannotFollowError: If the graph cannot keep the order of `follow`.
    """
    watcher = Watcher(options.artifacts)
    watcher.captured(step)
    options = for_graph(step, options)
    limits = limits_of(step.phase, options)
    selected = _selected(options, follow, whole=whole)
    for graph_pass in selected:
        plan = graph_pass.plan(step)
        watcher.planned(step, graph_pass, plan)
        if isinstance(plan, ExplicitPlan) and plan.starts and options.memory_budget_gb is not None:
            raise ConfigError(
                "modules say which others they prefetch, and a budget of bytes says when there is room: "
                "only one can hold",
                where=f"options={{'memory_budget_gb': {options.memory_budget_gb}}} and set_modules_to_..._prefetch()",
                instead="one of the two",
            )
        graph_pass.apply(step, plan)
        watcher.applied(step, graph_pass)
        if isinstance(graph_pass, InsertCollectives):
            seen(step)
        if isinstance(plan, SchedulePlan):
            # What starts where another rank starts it may be in memory a little longer than this rank's plan promises.
            promised = plan.budget_bytes if follow is None else None
            limits = dataclasses.replace(limits, unsharded_bytes=promised)
    if selected:
        last = selected[-1]
        check(step, after=last.name, stage=last.ensures, limits=limits)
    if options.poison:
        poison_freed_messages(step)
    step.graph.lint()
    return step


def _selected(options: FSDPOptions, follow: Sequence[str] | None, *, whole: bool) -> list[GraphPass[Any]]:
    """The passes that run, up to `options.stop_after`, so that they send and order messages as `follow` says."""
    every = passes(options, whole=whole)
    names = [CAPTURE, *(one.name for one in every)]
    if options.stop_after is not None and options.stop_after not in names:
        raise ConfigError(
            f"there is no pass {options.stop_after!r}", where="options={'stop_after': ...}", instead=", ".join(names)
        )
    selected = list(every if options.stop_after is None else every[: names.index(options.stop_after)])
    if follow is None:
        return selected
    order = FollowOrder(tuple(follow))
    following: list[GraphPass[Any]] = []
    for one in selected:
        if isinstance(one, ScheduleReshard):  # collectives have their last place before it
            following.append(order)
        following.append(dataclasses.replace(one, follow=order) if isinstance(one, BucketCollectives) else one)
    return following
