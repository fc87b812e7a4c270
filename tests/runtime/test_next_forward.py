"""`unshard_after_step`: the same bits, one gather less in forward, values that are never outdated, no memory left."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import explain, fully_shard, no_sync, step_in_backward
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.runtime import unshard
from fsdp_compile.runtime.module_state import units
from tests.models.kinds import Slim
from tests.numerics.one_process.pair import batches, loss_of
from tests.ranks import run_ranks

AFTER_STEP = {"unshard_after_step": True}


def _model(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Slim(2)
    for part in (*model.blocks, model):
        fully_shard(part)
    return torch.compile(model, backend="fsdp", options={"lower": "eager", "bucket_mb": 0, **options})


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _backward(model: nn.Module, seed: int) -> None:
    (batch,) = batches(1, 4 * dist.get_world_size(), seed=seed)
    loss_of(model(batch.chunk(dist.get_world_size())[dist.get_rank()])).backward()


def _unsharded(model: nn.Module) -> list[str]:
    """The units that are unsharded, or being gathered."""
    groups = [group for unit in units(model) for group in unit.param_groups]
    return [group.unit.title for group in groups if not group.unsharded.is_sharded]


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().clone() for p in model.parameters() if isinstance(p, DTensor)]


def _is_same(models: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(*map(_parameters, models), strict=True))


@torch.no_grad()
def _scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.25)


def _evaluate(model: nn.Module) -> None:
    (batch,) = batches(1, 4)
    with torch.no_grad():
        model(batch)


def _accumulate(model: nn.Module) -> None:
    with no_sync(model):
        _backward(model, 100)


def _nothing(_model: nn.Module) -> None:
    """Two steps with nothing between them."""


BETWEEN: dict[str, Callable[[nn.Module], None]] = {
    "nothing": _nothing,
    "write": _scale,
    "evaluation": _evaluate,
    "accumulation": _accumulate,
    "load": lambda model: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
}


def _steps(between: str, lower: str, in_backward: str) -> tuple[bool, list[list[str]], list[int]]:
    """Whether two models stay the same, what is unsharded after each step, and compiles after each step."""
    models = [_model(lower=lower), _model(lower=lower, **AFTER_STEP)]
    optimizers = [_optimizer(model) for model in models]
    if in_backward:
        optimizers = [step_in_backward(optimizer) for optimizer in optimizers]
    seen, compiles = [], []
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            _backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(_unsharded(models[1]))
        for model in models:
            BETWEEN[between](model)
        compiles.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return _is_same(models), seen, compiles


@pytest.mark.parametrize("between", BETWEEN)
def test_numbers_stay_the_same_bits_and_the_second_step_compiles_last(between: str) -> None:
    for is_same, seen, compiles in run_ranks(_steps, between, "eager", ""):
        assert is_same
        assert all(len(names) == 1 for names in seen)
        assert compiles[1] == compiles[-1] or between == "accumulation"
        assert compiles[2] == compiles[-1]


def test_numbers_stay_the_same_bits_with_inductor() -> None:
    for is_same, seen, _ in run_ranks(_steps, "nothing", "inductor", ""):
        assert is_same
        assert all(len(names) == 1 for names in seen)


def test_updates_in_backward_gather_when_the_optimizer_steps() -> None:
    for is_same, seen, _ in run_ranks(_steps, "nothing", "eager", "in_backward"):
        assert is_same
        assert all(len(names) == 1 for names in seen)
