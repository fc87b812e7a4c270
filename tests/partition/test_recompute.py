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
from tests.fake_world import fake_world
from tests.models.extended import Half, Layers
from tests.models.layers import InARow
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


@pytest.mark.long
def test_no_bit_changes_with_random_numbers_and_running_statistics() -> None:
    for same, peak, less in run_ranks(_both_ways, "eager", _least_bytes() / 1e9):
        assert same
        assert less < 0.7 * peak


@pytest.mark.parametrize("first", [nn.Identity(), nn.Linear(6, 6)], ids=["no other graph", "another graph"])
def test_a_budget_of_a_model_with_units_that_only_hooks_gather_is_refused(first: nn.Module) -> None:
    with fake_world(2):
        model = InARow([first, Layers(Half, rows=64)])
        for part in (model.blocks[1], model):
            fully_shard(part)
        options: dict[str, Any] = {"lower": "eager", "memory_budget_gb": 1.0}
        compiled = torch.compile(model, backend="fsdp", options=options)
        with pytest.raises(BackendCompilerFailed, match=r"(?s)ConfigError: FSDP2's hooks gather unit blocks.1 .*all_g"):
            compiled(torch.randn(1024, 6)).square().mean().backward()


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
