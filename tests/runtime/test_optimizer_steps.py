"""Steps of optimizers outdate what is unsharded of their own parameters, and of no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_compile.runtime import unshard
from fsdp_compile.runtime.module_state import units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import flat_step, fully_shard, whole_step
from tests.fake_world import fake_world
from tests.ranks import run_ranks


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)


def _train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _probe() -> None:
    """Trains a plain layer on one rank alone."""
    if dist.get_rank() == 0:
        layer = nn.Linear(6, 2)
        _train(layer, _optimizer(layer))


def _step_beside_a_probe() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)))
    model.set_reshard_after_backward(False)
    call = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    optimizer = _optimizer(model)
    for _ in range(3):
        _train(call, optimizer)
        call(torch.ones(4, 6))
        _probe()


def test_a_rank_that_trains_a_plain_model_of_its_own_gathers_nothing_alone() -> None:
    run_ranks(_step_beside_a_probe, timeout_s=60)


def _is_unsharded(model: nn.Module) -> list[bool]:
    groups = [group for unit in units(model) for group in unit.param_groups]
    return [not (group.unsharded.is_sharded or unshard.is_outdated(group)) for group in groups]


def test_a_step_outdates_the_models_of_its_optimizer_however_it_writes() -> None:
    changes: list[Callable[[torch.optim.Optimizer], object]] = [lambda optimizer: optimizer, flat_step, whole_step]
    with fake_world(2):
        for change in changes:
            mesh = init_device_mesh("cpu", (2,))
            mine, other = (fully_shard(nn.Linear(6, 4), mesh=mesh) for _ in range(2))
            model: Any
            for model in (mine, other):
                model.set_reshard_after_backward(False)
            optimizer = _optimizer(mine)
            change(optimizer)
            mine(torch.ones(4, 6)).square().mean().backward()
            other(torch.ones(4, 6)).square().mean().backward()
            assert _is_unsharded(mine) == _is_unsharded(other) == [True]
            optimizer.step()
            assert _is_unsharded(mine) == [False], change
            assert _is_unsharded(other) == [True], change


def _losses(model: nn.Module, change: Callable[[torch.optim.Optimizer], object]) -> list[float]:
    """Trains with an optimizer for each parameter, which a hook steps as soon as its gradient is there."""
    for parameter in model.parameters():
        # It writes plain tensors without counting that.
        optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
        change(optimizer)

        def step(_parameter: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def _flat_steps_in_hooks() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    plain = copy.deepcopy(model)
    fully_shard(model)
    model.set_reshard_after_backward(False)
    assert _losses(model, flat_step) == pytest.approx(_losses(plain, lambda optimizer: optimizer))


def test_a_flat_step_in_a_gradient_hook_outdates_what_is_unsharded() -> None:
    run_ranks(_flat_steps_in_hooks)
