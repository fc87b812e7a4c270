"""LBFGS on ranks with rows of their own: it searches and stops as one process with all rows does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from fsdp_compile import full_tensors, fully_shard, whole_step
from tests import long
from tests.ranks import run_ranks


class _Fit:
    """A model with its optimizer, and rows to fit."""

    def __init__(self, rows: slice, prepare: Any) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(4, 8, dtype=torch.float64)[rows]
        self.goals = torch.tensor([[5.0], [5.0], [10.0], [10.0]], dtype=torch.float64)[rows]
        self.model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.optimizer = prepare(self.model)
        self.calls = 0

    def closure(self, *, returns_number: bool) -> torch.Tensor | float:
        self.calls += 1
        self.optimizer.zero_grad()
        loss: torch.Tensor = (self.model(self.x) - self.goals).pow(4).mean()
        loss.backward()
        return loss.item() if returns_number else loss


def _check(line_search: str | None, is_whole: bool, returns_number: bool, replicas: int = 1) -> None:  # noqa: FBT001
    make = functools.partial(optim.LBFGS, max_iter=8, tolerance_change=1e-3, line_search_fn=line_search)

    def sharded(model: nn.Module) -> optim.Optimizer:
        optimizer = make(fully_shard(model, mesh=mesh).parameters())
        return whole_step(optimizer) if is_whole else optimizer

    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
    own = slice(4 // world * rank, 4 // world * (rank + 1))
    mine, one = _Fit(own, sharded), _Fit(slice(None), lambda model: make(model.parameters()))
    for _ in range(3):
        losses = [
            float(each.optimizer.step(functools.partial(each.closure, returns_number=returns_number)))
            for each in (mine, one)
        ]
        assert losses[0] == pytest.approx(losses[1])
    assert mine.calls == one.calls
    for name, value in full_tensors(mine.model):
        torch.testing.assert_close(value, one.model.state_dict()[name], rtol=1e-5, atol=1e-7, msg=name)


@long.parametrize(
    ("line_search", "is_whole", "returns_number"),
    [("strong_wolfe", True, False), ("strong_wolfe", False, True), (None, True, True), (None, False, False)],
    always=[("strong_wolfe", False, True)],
)
def test_lbfgs_goes_as_far_as_one_process(line_search: str | None, is_whole: bool, returns_number: bool) -> None:  # noqa: FBT001
    run_ranks(_check, line_search, is_whole, returns_number)


def test_replicas_search_one_line() -> None:
    run_ranks(_check, "strong_wolfe", True, False, 2, world_size=4)  # noqa: FBT003
