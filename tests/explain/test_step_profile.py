"""A step planned and measured: what is read of a trace, and a real step on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

import fsdp_compile
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.step_profile import STEP, Lane, Side, StepProfile, measured_side, planned_side
from tests.ranks import on_ranks, run_ranks


def _event(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": 1000 + begin, "dur": end - begin, "args": args}


def _memory(at: float, change: int, device: int = 0) -> dict[str, Any]:
    return {"ph": "i", "name": "[memory]", "ts": 1000 + at, "args": {"Bytes": change, "Device Type": device}}


def test_a_cpu_computes_whenever_the_thread_of_the_step_does_not_wait() -> None:
    side = measured_side([
        _event(STEP, 0, 100, "user_annotation"),
        _event("_c10d_functional::wait_tensor", 10, 20),
        _event("_c10d_functional::wait_tensor", 12, 18),  # inside of it, by the dispatcher
        _event("_c10d_functional::wait_tensor", 30, 35, tid=2),  # another thread's
        _event("gloo:all_gather", 5, 19, "user_annotation", tid=3),
        _event("autograd::engine::evaluate_function: MulBackward0", 40, 60),
        _event("gloo:all_reduce", 50, 70, "user_annotation", tid=3),
        _event("_c10d_functional::wait_tensor", 65, 75),
        _event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 78, 80),
        _event("gloo:broadcast", 90, 95, "user_annotation", tid=3),
        _memory(-1, 500),
        _memory(50, -30),
        _memory(20, 100),
        _memory(90, 7),
        _memory(60, 10_000, device=1),
    ])  # fmt: skip
    assert side == Side(
        lanes={
            Lane.COMPUTATION: ((0, 10), (20, 65), (75, 100)),
            Lane.GATHERS: ((5, 19),),
            Lane.REDUCTIONS: ((50, 70),),
            Lane.OTHER: ((90, 95),),
        },
        memory=((0, 0), (20, 100), (50, 70), (90, 77)),
        backward_us=40,
        end_us=80,
    )
    assert side.busy_us == {Lane.COMPUTATION: 60, Lane.GATHERS: 14, Lane.REDUCTIONS: 20, Lane.OTHER: 0}
    assert side.exposed_us == 9 + 5
    assert side.peak_bytes == 100


def test_on_a_device_kernels_are_what_runs_and_belong_to_the_phase_that_launched_them() -> None:
    def launched(name: str, at: float, begin: float, end: float, number: int) -> list[dict[str, Any]]:
        launch = _event("cudaLaunchKernel", at, at + 1, "cuda_runtime", correlation=number)
        return [launch, _event(name, begin, end, "kernel", tid=7, correlation=number)]

    side = measured_side([
        _event(STEP, 0, 100, "user_annotation"),
        *launched("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 1, 3, 13, 1),
        *launched("sm90_gemm", 2, 10, 30, 2),
        _event("autograd::engine::evaluate_function: CompiledFunctionBackward", 5, 20, tid=2),
        *launched("triton_poi_fused", 6, 30, 50, 3),
        *launched("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)", 7, 52, 60, 4),
        *launched("adam", 25, 61, 80, 5),
        _event("nccl:_all_gather_base", 3, 13, "gpu_user_annotation", tid=7),
        _event("_c10d_functional::wait_tensor", 3, 4),  # of the host, which the device does not see
        _memory(2, 64, device=1),
        _memory(3, 1000),
    ])  # fmt: skip
    assert side.lanes == {
        Lane.COMPUTATION: ((10, 50), (61, 80)),
        Lane.GATHERS: ((3, 13),),
        Lane.REDUCTIONS: ((52, 60),),
        Lane.OTHER: (),
    }
    assert (side.backward_us, side.end_us) == (30, 60)
    assert side.exposed_us == 7 + 8
    assert side.memory == ((0, 0), (2, 64))


def test_a_forward_by_itself_has_no_backward() -> None:
    side = measured_side([_event(STEP, 0, 10, "user_annotation")])
    assert (side.backward_us, side.end_us) == (10, 10)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x

    def sharded(self) -> _Model:
        for layer in self.layers:
            fsdp_compile.fully_shard(layer)
        return fsdp_compile.fully_shard(self)


def _profiled() -> tuple[StepProfile, float, str]:
    model = _Model().sharded()
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager", "bucket_mb": 0})
    x, grown = torch.ones(64, 256), list[torch.Tensor]()

    def step() -> None:
        compiled(x).sum().backward()
        grown.append(torch.zeros(10**6))  # 4 MB after backward
        model.zero_grad()

    with pytest.raises(ConfigError, match="has not run yet"):
        fsdp_compile.profile_step(compiled, step)
    step()
    step()
    with profile(), pytest.raises(ConfigError, match="a profiler runs already"):
        fsdp_compile.profile_step(compiled, step)
    found = fsdp_compile.profile_step(compiled, step)
    return found, fsdp_compile.explain(model).step_us, str(found)


def test_a_step_on_two_ranks_is_measured_beside_its_plan() -> None:
    for found, h100_us, text in run_ranks(_profiled, world_size=2):
        planned, measured = found.planned, found.measured
        for side in (planned, measured):
            # Each layer is gathered in forward, all but the first again in backward, and reduced once.
            assert side.lanes[Lane.GATHERS]
            assert side.lanes[Lane.REDUCTIONS]
            assert not side.lanes[Lane.OTHER]
            assert side.lanes[Lane.REDUCTIONS][0][0] >= side.backward_us
            assert 0 < side.backward_us < side.end_us
            assert 0 < side.busy_us[Lane.COMPUTATION] <= side.end_us
        assert planned.end_us > h100_us  # for the CPU that it ran on
        # All memory of the step is torch's: the plan knows of all but gloo's copies.
        assert 0.5 < measured.peak_bytes / planned.peak_bytes < 2
        after = [held for at_us, held in measured.memory if at_us > measured.end_us]
        assert max(after) >= 4e6
        assert "planned for cpu" in text.replace("\n", " ")
        assert "exposed communication" in text
        assert found.to_dict()["measured"]["end_us"] == measured.end_us


def test_the_planned_side_is_the_plan_on_one_clock() -> None:
    with torch.device("meta"):
        model, x = _Model(), torch.ones(64, 256)
    plan = fsdp_compile.explain(model, x, world_size=4)
    side = planned_side(plan)
    assert side.end_us == pytest.approx(plan.step_us)
    assert side.backward_us == pytest.approx(sum(graph.end_us for graph in plan.forward))
    assert side.busy_us[Lane.COMPUTATION] == pytest.approx(plan.compute_us)
    assert side.memory[0] == (0.0, 0)
    before = next(sum(live[0] for live in graph.memory.live_bytes.values()) for graph in plan.forward)
    assert side.peak_bytes == plan.peak_bytes - before


@on_ranks()
def test_blocks_that_share_code_take_a_plan() -> None:
    with torch.device("meta"):
        plain, x = _Model(), torch.ones(64, 256)
    plan = fsdp_compile.explain(plain, x, options={"regions": "blocks", "lower": "eager"})
    compiled = torch.compile(_Model().sharded(), backend="fsdp", options={"lower": "eager", "regions": "blocks"})

    def step() -> None:
        compiled(torch.ones(64, 256)).sum().backward()

    step()
    step()
    with pytest.raises(ConfigError, match="shares the code"):
        fsdp_compile.profile_step(compiled, step)
    found = fsdp_compile.profile_step(compiled, step, plan=plan)
    assert found.planned == planned_side(plan)
    assert found.measured.lanes[Lane.REDUCTIONS]
