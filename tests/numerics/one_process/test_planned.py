"""A planned schedule: the numbers of one process, in the memory that it was given."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard as fsdp2

from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes
from fsdp_compile import BudgetTooSmallError, ConfigError, backend, explain, fully_shard, units
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import Quantity, hardware
from fsdp_compile.cost.memory import Holder
from fsdp_compile.explain.plan import Plan
from fsdp_compile.ir.graph import Phase, StepGraph
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.lower.region import Region
from fsdp_compile.passes.delay_weight_gradients import DelayPlan, DelayWeightGradients
from fsdp_compile.passes.schedule_auto import ScheduleAuto
from fsdp_compile.passes.settings import FUSION
from tests import long
from tests.cost.graphs import Sketch
from tests.fake_world import fake_world
from tests.models.kinds import KINDS, Slim
from tests.models.round_sizes import WIDTH, Stack, on_meta
from tests.numerics.one_process.measure import batches, train_pair
from tests.ranks import on_ranks
from tests.two_sides import MIXED, WithFsdp2, mesh_of, sgd, share

SLOW = hardware("cpu", 0.01)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["full", "hybrid"])
@on_ranks(world_size=4)
def test_a_slow_link_splits_units_at_the_edges(shape: tuple[int, ...]) -> None:
    prepare = functools.partial(fully_shard, mesh=mesh_of(shape))
    train_pair(KINDS["stack"], prepare=prepare, options={"prefetch": "auto", "hardware": SLOW})


def _wide_first() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 512, bias=False), nn.Tanh(), nn.Linear(512, 16, bias=False))


def _each_layer(model: nn.Module) -> None:
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer)
    fully_shard(model)


def _delayed(make: Callable[[], nn.Module]) -> list[int]:
    """Trains where products are as slow as the link; how many gradients of weights each plan delays."""
    slow = dataclasses.replace(SLOW.device, matmul={torch.float32: Quantity(3e7, "FLOP/s", "as slow as the link")})
    moved: list[int] = []
    plan = DelayWeightGradients.plan

    def recorded(graph_pass: DelayWeightGradients, step: StepGraph) -> DelayPlan:
        found = plan(graph_pass, step)
        moved.append(len(found.moved))
        assert not found.moved or found.tail_us < found.tail_before_us
        return found

    with mock.patch.object(DelayWeightGradients, "plan", recorded):
        train_pair(make, prepare=_each_layer, options={"hardware": dataclasses.replace(SLOW, device=slow)})
    return moved


@pytest.mark.core
@on_ranks()
def test_weight_gradients_that_are_really_delayed_are_those_of_one_process() -> None:
    every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, _delayed(_wide_first))
    assert every[0] == every[1]
    assert max(every[0]) > 0


class _Scaled(torch.autograd.Function):
    """A linear layer times a scale that its backward doubles for the next step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shown: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight, scale, scale.view(1, 1) if shown == "view" else scale)
        return x @ weight.t() * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale, shown = ctx.saved_tensors
        of_x, of_weight = grad @ weight * scale, grad.t() @ x * shown
        scale.mul_(2)
        return of_x, of_weight, None, None


class _ScaledLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int, shown: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.register_buffer("scale", torch.ones(()))
        self.shown = shown

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scaled.apply(x, self.weight, self.scale, self.shown)


@long.parametrize("shown", ["itself", "view"], always=["view"])
@on_ranks()
def test_weight_gradients_of_a_scale_that_backward_writes_are_not_delayed_past_the_write(shown: str) -> None:
    _delayed(lambda: nn.Sequential(_ScaledLinear(32, 512, shown), nn.Tanh(), _ScaledLinear(512, 16, shown)))


def _plan(gb_per_s: float, **options: Any) -> Plan:
    model, x = on_meta(Stack)
    given = {"lower": "eager", "mp_policy": MIXED, "prefetch": "auto", **options}
    return explain(model, x, world_size=8, options=given, hardware=hardware(link=gb_per_s))


def _gathered_bytes(plan: Plan) -> list[int]:
    return [max(graph.memory.live_bytes[Holder.UNSHARDED]) for graph in plan.graphs]


@long.parametrize("gb_per_s", [0.1, 50.0, 1000.0], always=[50.0])
def test_by_default_it_holds_two_units_in_forward_and_four_in_backward(gb_per_s: float) -> None:
    plan = _plan(gb_per_s)
    forward, backward = plan.graphs
    (unit,) = {c.size_bytes for c in _plan(1000.0).graphs[0].collectives}
    # Small parameters are copied out of the message that they share.
    copied = 2 * 2 * 2 * WIDTH
    assert max(forward.memory.live_bytes[Holder.UNSHARDED]) <= 2 * unit + copied
    # Reduced gradients are float32: two units of them are four in bytes.
    both = zip(backward.memory.live_bytes[Holder.UNSHARDED], backward.memory.live_bytes[Holder.GRADIENT], strict=True)
    assert max(gathered + gradients for gathered, gradients in both) <= 2 * unit + 4 * unit + unit + copied


@pytest.mark.long
def test_a_budget_is_kept_and_one_that_cannot_be_is_refused_with_the_least_that_can() -> None:
    free = _plan(1.0)
    budget = free.peak_bytes * 0.98
    held = _plan(1.0, memory_budget_gb=budget / 1e9)
    assert held.peak_bytes <= budget
    with pytest.raises(BudgetTooSmallError, match=r"do not hold what %.* needs at once") as caught:
        _plan(1.0, memory_budget_gb=free.peak_bytes / 2e9)
    assert "memory_budget_gb" in str(caught.value)
    least = _plan(1.0, memory_budget_gb=caught.value.least_bytes / 1e9)
    assert least.peak_bytes < caught.value.least_bytes, "a loss and unread buffers have room, too"
    said = re.search(r"at least ([\d.e-]+),", str(caught.value))
    assert said is not None
    assert float(said[1]) * 1e9 == pytest.approx(caught.value.least_bytes, rel=0.01)
    assert float(said[1]) * 1e9 >= caught.value.least_bytes, "a number copied from the message is accepted"


@long.parametrize("share", [1.0, 1.05, 1.2], always=[1.05])
def test_a_budget_is_kept_by_what_kernels_hold_until_they_run(share: float) -> None:
    """Casts of gradients run right before their reduction, beside what a plan starts there."""
    model = nn.Sequential(*(_Wide() for _ in range(3))).to("meta")

    def planned(budget_bytes: float) -> Plan:
        options = {"lower": "eager", "mp_policy": MIXED, "bucket_mb": 0, "memory_budget_gb": budget_bytes / 1e9}
        x = torch.empty(16, 256, device="meta")
        return explain(model, x, world_size=8, options=options, hardware=hardware(link=1.0))

    with mock.patch.dict(FUSION, eager=Fusion.KERNELS):
        with pytest.raises(BudgetTooSmallError) as caught:
            planned(1e5)
        budget_bytes = math.ceil(caught.value.least_bytes * share)
        assert planned(budget_bytes).peak_bytes <= budget_bytes


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def test_a_graph_that_computes_nothing_needs_no_plan() -> None:
    s = Sketch(Phase.BACKWARD)
    plan = ScheduleAuto(budget_bytes=10**9).plan(s.done(s.input("tangents_1", 4)))
    assert not plan.hoists
    assert not plan.awaits


def test_a_refused_forward_is_announced_to_no_rank() -> None:
    announced: list[object] = []
    error = BudgetTooSmallError("too little", where="here", instead="more")

    def refuse(step: StepGraph) -> StepGraph:
        if step.phase is Phase.FORWARD:
            raise error
        return step

    region = Region({}, refuse, settle=lambda graphs, _follow: announced.append(graphs))

    def transform() -> None:
        halves = [s.done(s.input("x", 4)) for s in map(Sketch, Phase)]
        with region._transforming(halves[0].gm):
            region.steps = region._both(halves)

    with pytest.raises(BudgetTooSmallError):
        transform()
    assert announced == []
    region.transform = lambda step: step
    transform()
    assert [step.phase for step in region.steps] == list(Phase)
    assert len(announced) == 1


@pytest.mark.parametrize(("given", "reuse"), [({}, None), ({"memory_budget_gb": 1.0}, False)])
def test_inductor_frees_at_the_last_use_under_a_budget(given: dict[str, Any], reuse: bool | None) -> None:  # noqa: FBT001
    settings: list[Any] = []

    def record(_gm: Any, _examples: Any, _region: Any, inductor: dict[str, Any]) -> Any:
        settings.append(inductor)
        raise RuntimeError("seen")

    with fake_world(2), mock.patch.object(backend, "compile_with_inductor", record):
        inductor: list[dict[str, Any]] = [{}, {"allow_buffer_reuse": True}]
        for own in inductor:
            options: dict[str, Any] = {**given, "inductor": own}
            with pytest.raises(Exception, match="seen"):
                torch.compile(nn.Linear(4, 4), backend="fsdp", options=options)(torch.ones(2, 4))
            torch._dynamo.reset()
    assert [s.get("allow_buffer_reuse") for s in settings] == [reuse, True]


def test_a_larger_budget_is_used_where_the_link_is_the_bottleneck() -> None:
    small, large = _plan(1.0), _plan(1.0, memory_budget_gb=1.0)
    assert max(_gathered_bytes(small)) < max(_gathered_bytes(large))
    assert large.step_us <= small.step_us


def test_a_plan_for_another_link_is_the_one_made_for_it() -> None:
    assert _plan(50.0).at(gb_per_s=1.0) == _plan(1.0)


def test_options_that_a_fixed_distance_would_ignore_are_refused() -> None:
    model, x = on_meta(Stack)
    for option, value in (("memory_budget_gb", 1.0), ("hardware", SLOW)):
        with pytest.raises(ConfigError, match=option):
            explain(model, x, world_size=8, options={"prefetch": 1, option: value})
    with pytest.raises(ConfigError, match="memory_budget_gb"):
        explain(model, x, world_size=8, options={"prefetch": "auto", "memory_budget_gb": 0})


# Budgets and `reshard_after_forward="auto"` while gradients are accumulated.


def _shard(model: Any, fully_shard: Any = fsdp2, **options: Any) -> None:
    for part in (*model.blocks, model):
        fully_shard(part, **options)
        part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide for FSDP2


@on_ranks()
def test_microbatches_keep_units_for_backward_alone_and_give_the_bits_of_fsdp2() -> None:
    pair = WithFsdp2(
        lambda: Slim(2),
        _shard,
        lambda step: share(batches(1, 4 * dist.get_world_size(), seed=step)[0]),
        ours=lambda model: _shard(model, fully_shard, reshard_after_forward="auto"),
        optimizer=sgd,
    )
    call = pair.compiled(fullgraph=False, hardware=SLOW, memory_budget_gb=1.0)
    saved: list[int] = []
    for step in range(2):
        for number in range(3):
            pair.change(lambda model: model.set_requires_gradient_sync(number == 2))  # noqa: B023  runs at once
            pair.backward()
            if step == 0:
                saved.append(len(_gathered_in_backward(call)))
        pair.compare_gradients()
        pair.update()
        pair.compare_parameters()
    assert max(saved) == 0, "all that backward reads was saved by forward"


def _gathered_in_backward(model: nn.Module) -> list[str]:
    return [c.unit for graph in explain(model).backward for c in graph.collectives if c.kind is Kind.GATHER]


def _accumulated_bytes(model: nn.Module) -> int:
    """Bytes of full gradients between microbatches."""
    groups = [group for unit in units(model) for group in unit.groups if group.pending]
    return sum(g.pending.numel(GradPlacement.UNREDUCED) * g.pending.dtype().itemsize for g in groups)


def _resharded(budget_bytes: int) -> Any:
    options: dict[str, Any] = {"lower": "eager", "hardware": SLOW, "activations": "saved"}
    options["memory_budget_gb"] = budget_bytes / 1e9
    return torch.compile(fully_shard(Stack(6)), backend="fsdp", options=options)


def _least_budget(x: torch.Tensor) -> int:
    """The smallest budget, to a byte, that compiles for a microbatch that is not reduced."""
    budget_bytes = 1_000_000
    while True:
        torch.compiler.reset()
        compiled = _resharded(budget_bytes)
        compiled.set_requires_gradient_sync(False)
        try:
            compiled(x).sum().backward()
        except (BackendCompilerFailed, BudgetTooSmallError) as error:
            cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
            assert isinstance(cause, BudgetTooSmallError)
            assert cause.least_bytes > budget_bytes
            budget_bytes = cause.least_bytes
        else:
            return budget_bytes


def test_a_budget_holds_gradients_of_earlier_microbatches() -> None:
    with emulated_world(2, Network(Link(bytes_per_s=1e15))):
        x = torch.randn(64, WIDTH)
        budget_bytes = _least_budget(x)
        torch.compiler.reset()
        compiled = _resharded(budget_bytes)
        compiled.set_requires_gradient_sync(False)

        def run() -> None:
            compiled(x).sum().backward()

        run()  # compiles
        peaks = []
        for _ in range(2):
            gradient_bytes = _accumulated_bytes(compiled)
            peaks.append(measured_peak_bytes(compiled, x, run, "cpu") + gradient_bytes)
    assert gradient_bytes == 6 * 4 * (WIDTH * WIDTH + 2 * WIDTH)
    assert max(peaks) <= budget_bytes
    assert max(peaks) > 0.9 * budget_bytes, "no more is asked for than is needed"


class _Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 2048)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.head(x)
        return y.logsumexp(-1).sum(), y.detach().exp()


def test_a_budget_counts_outputs_that_have_no_gradient() -> None:
    def peak_gb(**options: Any) -> float:
        plan = explain(_Metrics(), torch.randn(1024, 64), world_size=4, options={"lower": "eager", **options})
        return max(graph.memory.peak_bytes for graph in plan.graphs) / 1e9

    with pytest.raises(BudgetTooSmallError):
        peak_gb(memory_budget_gb=peak_gb() - 0.004, activations="saved")  # the metrics take 0.008
