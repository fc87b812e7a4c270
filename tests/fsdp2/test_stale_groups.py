"""Optimizers with groups and schedules, and lists of parameters, from before the first compiled call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.fsdp2.stale import StaleParameter
from tests.models.outlines import Small
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, compile_eagerly, sgd


@on_ranks()
def test_groups_several_optimizers_and_a_schedule() -> None:
    pair = WithOneProcess(Small, Run.PLAIN)

    def make(parameters: Any) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() >= 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [], "lr": 1e-3, "mine": "kept"}]
        return torch.optim.AdamW(groups, lr=1e-2)

    def others(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.dim() < 2], lr=1e-1)

    pair.optimize(make)
    pair.optimize(others)
    for mine, theirs in pair.optimizers[:1]:
        mine.add_param_group({"params": [], "lr": 0.0})
        theirs.add_param_group({"params": [], "lr": 0.0})
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for p in pair.optimizers for o in p]
    groups = pair.optimizers[0][0].param_groups
    for _ in range(3):
        pair.train(steps=1)
        for scheduler in schedulers:
            scheduler.step()
    mine, theirs = pair.optimizers[0]
    assert mine.param_groups is groups
    assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert [g["weight_decay"] for g in mine.param_groups] == [g["weight_decay"] for g in theirs.param_groups]
    assert mine.param_groups[1]["mine"] == "kept"
    assert all(isinstance(p, DTensor) for p in mine.param_groups[0]["params"])


Change = Callable[[list[nn.Parameter]], object]


def _clip(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.clamp_(-0.05, 0.05)


def _freeze(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters[:2]:
        parameter.requires_grad = False


def _mark(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.tag = 2.0  # type: ignore[attr-defined]
        assert parameter.tag == 2.0  # type: ignore[attr-defined]


def _shapes(parameters: list[nn.Parameter]) -> list[tuple[Any, ...]]:
    return [(p.ndim, p.shape, p.dtype, p.requires_grad, getattr(p, "tag", None)) for p in parameters]


class _Tagged(Small):
    """Reads a mark of a parameter in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self.scale, "tag", 1.0)


def _check_changed(change: Change) -> None:
    """A list that was taken before, and changed before the first step and after it."""
    pair = WithOneProcess(_Tagged, Run.UNSHARDED, optimizer=sgd)
    old, theirs = (list(model.parameters()) for model in pair)
    pair.call = compile_eagerly(pair.model)
    pair.backward()
    for _ in range(2):
        change(old)
        change(theirs)
        assert _shapes(old) == _shapes(theirs)
        pair.compare()
        pair.train(steps=1)
    assert all(isinstance(p, StaleParameter) == bool(p.dim()) for p in old), "FSDP2 cannot split numbers: they stay"


@on_ranks()
def test_changes_through_an_old_list_of_parameters_are_those_of_the_sharded_ones() -> None:
    for change in (_clip, _freeze, _mark):
        _check_changed(change)
