"""`options={"poison": True}`: the same numbers, and a `PoisonError` where memory is read after it was freed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from fsdp_compile import MixedPrecision, PoisonError, fully_shard
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import last_of
from fsdp_compile.passes.schedule_reshard import ReshardPlan, ScheduleReshard
from tests.models.kinds import WIDTH, Slim
from tests.ranks import on_ranks
from tests.two_sides import loss_of


def _trained(lower: str, *, poison: bool, precision: MixedPrecision | None = None) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Slim()
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="fsdp", options={"lower": lower, "poison": poison})
    for _ in range(2):
        loss_of(compiled(torch.randn(4, WIDTH))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lower", "dtype"),
    [
        ("eager", torch.int8),
        pytest.param("inductor", None, marks=[pytest.mark.inductor, pytest.mark.long]),
        pytest.param("inductor", torch.float8_e4m3fn, marks=[pytest.mark.inductor, pytest.mark.long]),
    ],
)
@on_ranks()
def test_it_changes_no_number(lower: str, dtype: torch.dtype | None) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, gather_dtype=dtype)
    without, poisoned = [_trained(lower, poison=poison, precision=precision) for poison in (False, True)]
    for one, other in zip(without, poisoned, strict=True):
        assert torch.equal(one, other)


def _named(make: Callable[[], object]) -> str:
    torch._dynamo.reset()
    with pytest.raises(PoisonError) as caught:
        make()
    return str(caught.value)


def _free_too_early() -> None:
    """Frees each message right after its wait, before anything reads it."""
    plan_of = ScheduleReshard.plan

    def plan(self: ScheduleReshard, step: StepGraph) -> ReshardPlan:
        order, plan = step.order(), plan_of(self, step)
        early = [dataclasses.replace(one, last_use=last_of(one.messages, order)) for one in plan.releases]
        return dataclasses.replace(plan, releases=tuple(early))

    with mock.patch.object(ScheduleReshard, "plan", plan), mock.patch("fsdp_compile.pipeline.check"):
        _trained("eager", poison=True)


def _nan_parameter() -> None:
    model = Slim()
    with torch.no_grad():
        model.head.weight[3, 4] = float("nan")
    torch.compile(model, backend="fsdp", options={"lower": "eager", "poison": True})(torch.randn(4, WIDTH))


@on_ranks()
def test_what_reads_freed_memory_is_named() -> None:
    freed, parameter = _named(_free_too_early), _named(_nan_parameter)
    assert "the reduced gradient of head, blocks.1, blocks.0 has NaN in" in freed
    assert re.search("what blocks.0, blocks.1, head gathers has NaN in 1 of", parameter), parameter
