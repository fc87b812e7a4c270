"""Blocks are computed again in backward, as few as a budget takes, and change no bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_compile import BudgetTooSmallError, ConfigError, FSDPOptions, explain, fully_shard
from fsdp_compile._torch.dynamo import CheckpointPolicy
from fsdp_compile._torch.tensors import local_tensor
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.explain.plan import Plan
from fsdp_compile.ops.embedding import AVERAGE_ROWS, LOOK_UP
from fsdp_compile.partition.recompute import recompute, with_fewest
from tests.models.extended import Half, Layers
from tests.ranks import run_ranks

WIDTH, ROWS, BLOCKS = 32, 64, 3
CPU = hardware("cpu", "ethernet-10")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class _Model(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def _plan(*, checkpoints: bool = False, **options: Any) -> Plan:
    model, x = _Model(checkpoints=checkpoints).to("meta"), torch.empty(ROWS, WIDTH, device="meta")
    return explain(model, x, world_size=2, options={"lower": "eager", **options}, hardware=CPU)


def _compute_us(plan: Plan) -> float:
    return sum(graph.compute_us for graph in plan.graphs)


@functools.cache
def _least_bytes(**options: Any) -> int:
    with pytest.raises(BudgetTooSmallError) as caught:
        _plan(memory_budget_gb=1e-9, **options)
    return caught.value.least_bytes


def test_a_budget_is_kept_by_computing_again_and_by_no_more_than_it_takes() -> None:
    saved, least = _least_bytes(activations="saved"), _least_bytes()
    assert least < 0.7 * saved
    times = []
    for budget in (least, (least + saved) // 2, saved):
        plan = _plan(memory_budget_gb=budget / 1e9)
        assert plan.peak_bytes <= budget
        times.append(_compute_us(plan))
    assert times[0] > times[1] > times[2]
    assert times[2] == _compute_us(_plan(memory_budget_gb=saved / 1e9, activations="saved"))


def test_programs_that_checkpoint_by_themselves_are_left_as_they_are() -> None:
    assert _least_bytes(checkpoints=True) == _least_bytes(checkpoints=True, activations="saved")


@pytest.mark.parametrize("needed", range(6))
def test_the_fewest_blocks_are_found_and_made_last(needed: int) -> None:
    tried: list[int] = []

    def attempt(recomputed: int) -> int:
        tried.append(recomputed)
        if recomputed < needed:
            error = BudgetTooSmallError("too little", where="here", instead="more")
            error.least_bytes = 100 - recomputed
            raise error
        return recomputed

    if needed == 5:
        with pytest.raises(BudgetTooSmallError) as caught:
            with_fewest(attempt, lambda: 4)
        assert caught.value.least_bytes == 96
    else:
        assert with_fewest(attempt, lambda: 4) == needed == tried[-1]


@pytest.mark.parametrize("value", ["recomputed", True])
def test_another_value_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="activations"):
        FSDPOptions.from_dict({"activations": value})


def _trained(make: Callable[[], _Model], options: dict[str, Any]) -> tuple[list[torch.Tensor], float]:
    """Losses and gradients of three steps, and buffers; the estimated peak of the graphs that ran."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = make()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    compiled = torch.compile(model, backend="fsdp", options=options)
    found: list[torch.Tensor] = []
    for step in range(3):
        torch.manual_seed(step)
        loss = compiled(torch.randn(ROWS, WIDTH)).square().mean()
        model.zero_grad()
        loss.backward()
        found.append(loss.detach())
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            found.append(local_tensor(parameter.grad).clone())
    return [*found, *map(torch.clone, model.buffers())], explain(compiled).peak_bytes


def _both_ways(lower: str, budget_gb: float) -> tuple[bool, float, float]:
    """Whether a budget changes no bit; the peaks without and with it."""
    model = _Model()
    (plain, peak), (again, less) = (
        _trained(lambda: copy.deepcopy(model), {"lower": lower, **options})
        for options in ({}, {"memory_budget_gb": budget_gb})
    )
    same = len(plain) == len(again) and all(map(torch.equal, plain, again))
    return same, peak, less


def test_no_bit_changes_with_random_numbers_and_running_statistics() -> None:
    for same, peak, less in run_ranks(_both_ways, "eager", _least_bytes() / 1e9):
        assert same
        assert less < 0.7 * peak


def _gradients_with_classes(**options: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layers(Half, rows=64) for _ in range(BLOCKS)))
    for part in (*model, model):
        fully_shard(part)
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager", **options})
    compiled(torch.randn(1024, 6)).square().mean().backward()
    return [local_tensor(p.grad).clone() for p in model.parameters()]  # type: ignore[arg-type]


def _budgets_of_classes() -> tuple[int, int, bool]:
    """The least bytes with saved activations, and with others; whether the second budget changes no bit."""
    least = []
    for activations in ("saved", "auto"):
        with pytest.raises(BackendCompilerFailed) as caught:
            _gradients_with_classes(activations=activations, memory_budget_gb=1e-9)
        assert isinstance(caught.value.inner_exception, BudgetTooSmallError)
        least.append(caught.value.inner_exception.least_bytes)
    wanted, made = (_gradients_with_classes(**each) for each in ({}, {"memory_budget_gb": least[1] / 1e9}))
    return least[0], least[1], all(map(torch.equal, wanted, made))


def test_parameters_whose_class_gathers_them_have_budgets_too() -> None:
    for saved, least, is_same in run_ranks(_budgets_of_classes):
        assert 0 < least < 0.7 * saved
        assert is_same


@torch.library.custom_op("fsdp_test_recompute::same", mutates_args=())
def _same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_operators_that_are_not_torchs_and_exchanges_of_rows_are_not_computed_again() -> None:
    graph = torch.fx.Graph()
    known = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    own = graph.call_function(torch.ops.fsdp_test_recompute.same.default, (known,))
    rows = [graph.call_function(operator, (known,)) for operator in (LOOK_UP, AVERAGE_ROWS)]
    nodes = (known, own, *rows)
    recompute([nodes])
    assert [node.meta.get("recompute") for node in nodes] == [CheckpointPolicy.MUST_RECOMPUTE, None, None, None]
