"""What measured times of a link change: every estimate of its collectives, and how early they start."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.refined_plans import with_times
from fsdp_compile import FSDPOptions, explain
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.ir.graph import Phase, Role, StepGraph
from fsdp_compile.passes.planned_times import planned_times
from fsdp_compile.passes.schedule_auto import MARGIN, MEASURED_MARGIN, SchedulePlan, margin_of
from fsdp_compile.pipeline import transform
from fsdp_compile.planner.from_markers import outline
from fsdp_compile.planner.measured_times import PlannedTimes
from tests.models.round_sizes import WIDTH, Stack

THERE = hardware("cpu", 1.0)


@functools.cache
def captured() -> tuple[StepGraph, ...]:
    plan = explain(Stack(), torch.ones(64, WIDTH, device="meta"), world_size=4, hardware=THERE)
    assert plan.traced is not None
    return plan.traced.regions[0].steps


def planned(times: float | None, *, bucket_mb: float = 0) -> list[tuple[StepGraph, PlannedTimes]]:
    """Both graphs after the passes."""
    found: dict[Phase, PlannedTimes] = {}
    options = FSDPOptions(hardware=THERE, refine_after=2, bucket_mb=bucket_mb)
    link_times = {} if times is None else {"fsdp.shard.0": times}
    steps = [transform(with_times(step.copy(), link_times), options, found) for step in captured()]
    return [(step, found[step.phase]) for step in steps]


def test_a_plan_knows_its_calls_in_the_order_of_the_graph() -> None:
    for step, expected in planned(None):
        starts = list(step.nodes(Role.GATHER, Role.REDUCE))
        waits = list(step.nodes(Role.GATHER_WAIT, Role.REDUCE_WAIT))
        assert len(expected.transfers) == len(starts) > 1
        assert sum(call.waits for call in expected.calls) == len(waits)
        assert {call.transfer for call in expected.calls if call.waits} == set(range(len(starts)))
        assert expected.after == 2
        assert expected.compute_us == pytest.approx(expected.problem.compute_us)


def test_measured_times_multiply_estimates_before_and_after_the_passes() -> None:
    for (_, before), (step, after) in zip(planned(None), planned(1.19), strict=True):
        assert after.problem.link_us == pytest.approx(1.19 * before.problem.link_us)
        assert sum(one.time_us for one in after.transfers) == pytest.approx(after.problem.link_us)
        assert step.phase in (Phase.FORWARD, Phase.BACKWARD)
    for step in captured():
        marked, slower = (
            outline(with_times(step.copy(), times), THERE, Fusion.KERNELS, everything=False).problem.link_us
            for times in ({}, {"fsdp.shard.0": 2.0, "fsdp.shard.1": 9.0})
        )
        assert slower == pytest.approx(2 * marked)


def test_what_was_measured_needs_less_of_a_margin() -> None:
    for (step, _), (measured, _) in zip(planned(None), planned(1.0), strict=True):
        assert (margin_of(step), margin_of(measured)) == (MARGIN, MEASURED_MARGIN)


def test_edges_are_split_by_measured_times() -> None:
    """Computing goes on with a part of a unit where the link is slow beside it."""
    whole = ModuleWrapPolicy({nn.Embedding})  # of which there is none: one unit
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    inputs = torch.ones(512, 1024, device="meta")
    plan = explain(model, inputs, world_size=4, hardware=THERE, options={"auto_wrap_policy": whole})
    assert plan.traced is not None
    forward, _ = plan.traced.regions[0].steps
    steps = [
        transform(with_times(forward.copy(), {"fsdp.shard.0": times}), FSDPOptions(hardware=THERE))
        for times in (0.01, 1.0)
    ]
    assert [len(list(step.nodes(Role.GATHER))) for step in steps] == [1, 4]


def test_a_hook_reduces_by_an_operator_that_is_not_measured() -> None:
    step, expected = planned(None)[1]
    plan = SchedulePlan((), (), 0, 0, 0.0, 0.0, expected.problem, expected.placement)
    assert planned_times(step, plan, THERE, 1) is not None
    start = next(step.nodes(Role.REDUCE))
    start.target = torch.ops.fsdp_compile.reduce_grad.default
    assert planned_times(step, plan, THERE, 1) is None
