"""Plans that are made again with measured times: the same numbers, on all ranks at once, and never a hang."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, RankMismatchError, fully_shard, no_sync
from fsdp_compile._torch.inductor_cache import cache_in
from fsdp_compile._torch.stored_compiles import CAN_STORE
from fsdp_compile.lower import refine
from fsdp_compile.lower.compiled_regions import regions_of
from fsdp_compile.planner.measured_times import Measured
from fsdp_compile.runtime.module_state import units
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Broken, Stack
from tests.ranks import run_ranks

EAGER = {"lower": "eager"}


@dataclasses.dataclass
class Trained:
    """What comes of some steps.

    Attributes:
        numbers: Losses, gradients and parameters of each step.
        compiles: Compiled regions after each step.
        times: What reads say of the link after each step.
    """

    numbers: list[torch.Tensor] = dataclasses.field(default_factory=list)
    compiles: list[int] = dataclasses.field(default_factory=list)
    times: list[tuple[tuple[str, float], ...]] = dataclasses.field(default_factory=list)


def _train(
    least_gain: float,
    options: dict[str, Any],
    *,
    make: type[nn.Module] = Stack,
    steps: int = 5,
    replicas: int = 1,
    accumulate: bool = False,
) -> Trained:
    """Trains on every rank; a new plan is taken if it saves so much."""
    with mock.patch.object(refine, "LEAST_GAIN", least_gain):
        return _trained(options, make, steps, replicas, accumulate=accumulate)


def _trained(options: dict[str, Any], make: type[nn.Module], steps: int, replicas: int, *, accumulate: bool) -> Trained:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    shape = (replicas, dist.get_world_size() // replicas) if replicas > 1 else (dist.get_world_size(),)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape)
    for block in [module for module in model.modules() if type(module).__name__ == "Block"]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="fsdp", options=options)
    found = Trained()
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        if accumulate:
            with no_sync(model):
                compiled(torch.randn(4, WIDTH)).square().mean().backward()
        loss = compiled(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        found.numbers += [loss.detach(), *(_local(parameter.grad) for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found.numbers += [_local(parameter.detach()) for parameter in model.parameters()]
        found.compiles.append(1 + max(region.number for region in regions_of(units(model))))
        found.times.append(next(units(model)[0].params).spec.link_times)
    return found


def _local(value: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(value, DTensor)
    return value.to_local().clone()


def _same_numbers(first: Trained, second: Trained) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.numbers, second.numbers, strict=True))


def _refined_beside_plain(**settings: Any) -> tuple[bool, Trained]:
    plain = _train(1.0, EAGER, **settings)
    refined = _train(-1.0, {**EAGER, "refine_after": 2}, **settings)
    return _same_numbers(plain, refined), dataclasses.replace(refined, numbers=[])


def test_numbers_before_and_after_are_the_same_and_all_ranks_change_at_once() -> None:
    first, second = run_ranks(_refined_beside_plain)
    assert first == second, "another step, or other times"
    same, refined = first
    assert same
    assert refined.compiles == [1, 1, 1, 2, 2], "one step to warm up, and two that are measured"
    assert refined.times[:3] == [()] * 3
    ((link, times),) = refined.times[3]
    assert link.startswith("fsdp.shard.")
    assert times > 0
    assert refined.times[4] == refined.times[3], "it stays"


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"replicas": 2}, {"accumulate": True, "steps": 4}], ids=str)
def test_replicas_agree_and_steps_may_accumulate(settings: dict[str, Any]) -> None:
    found = run_ranks(_refined_beside_plain, world_size=4, **settings)
    assert all(each == found[0] for each in found)
    same, refined = found[0]
    assert same
    assert len(refined.times[-1]) == (2 if "replicas" in settings else 1)


def _not_worth_it(make: type[nn.Module]) -> Trained:
    least_gain = 2.0 if make is Stack else -1.0
    return dataclasses.replace(_train(least_gain, {**EAGER, "refine_after": 1}, make=make), numbers=[])


@pytest.mark.parametrize("make", [Stack, Broken])
def test_a_plan_stays_where_little_is_saved_and_where_graphs_break(make: type[nn.Module]) -> None:
    with fake_world(2):
        found = _not_worth_it(make)
    assert found.times == [()] * 5
    assert len(set(found.compiles)) == 1


def test_a_model_inside_of_a_compiled_function_is_not_measured_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refine._say_why_not.cache_clear()
    with fake_world(2), caplog.at_level("INFO", logger="fsdp_compile.progress"):
        model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        step = torch.compile(lambda x: model(x).sum(), backend="fsdp", options={**EAGER, "refine_after": 1})
        for _ in range(4):
            step(torch.ones(2, 4)).backward()
    assert caplog.text.count("steps of a model are not measured") == 1
    assert "by a compiled function around it" in caplog.text


def _measure_other_steps() -> str:
    try:
        _train(-1.0, {**EAGER, "refine_after": 1 + dist.get_rank()}, steps=1)
    except Exception as error:
        cause = getattr(error, "inner_exception", error)
        assert isinstance(cause, RankMismatchError)
        return str(cause)
    return ""


def test_ranks_that_measure_other_numbers_of_steps_are_refused() -> None:
    assert all("refine_after" in said for said in run_ranks(_measure_other_steps))


def _differ() -> Trained:
    """Ranks of which the second one finds the link eight times slower than the first one, and the gain is its own."""
    steps = 4 * (1 + dist.get_rank())

    def found(measured: Measured) -> dict[str, int]:
        return dict.fromkeys((transfer.link for planned, _ in measured for transfer in planned.transfers), steps)

    with (
        mock.patch.object(refine, "link_steps", found),
        mock.patch.object(refine, "gain", return_value=0.5 if dist.get_rank() else 0.0),
    ):
        return dataclasses.replace(_train(0.03, {**EAGER, "refine_after": 1}, steps=3), numbers=[])


def test_ranks_that_measure_other_times_take_the_same_ones() -> None:
    first, second = run_ranks(_differ)
    assert first == second
    assert [times for _, times in first.times[-1]] == [2.0], "the smallest: others wait for that rank"


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.skipif(not CAN_STORE, reason="this torch's cache of whole compiles has another form")
def test_code_of_inductor_is_measured_also_where_it_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    known = refine.Refinement.measured

    def counted(self: refine.Refinement) -> Any:
        found = known(self)
        measured.append(len(found))
        return found

    monkeypatch.setattr(refine.Refinement, "measured", counted)
    (tmp_path / "cache").mkdir(mode=0o700)
    with fake_world(2), cache_in(tmp_path / "cache"):
        for where in ("autograd_cache_saved", "autograd_cache_hit"):
            counters.clear()
            _train(2.0, {"refine_after": 1}, steps=3)
            assert counters["aot_autograd"][where] == 1
    assert measured == [2, 2], "a forward and a backward, with the calls of their plans"


def test_cuda_graphs_are_refused() -> None:
    options: dict[str, Any] = {"refine_after": 1, "inductor": {"triton.cudagraphs": True}}
    with fake_world(2), pytest.raises(Exception, match="CUDA graphs are replayed") as caught:
        torch.compile(nn.Linear(4, 4), backend="fsdp", options=options)(torch.ones(2, 4))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), ConfigError)
