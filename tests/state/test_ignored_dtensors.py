"""Full values of DTensors that `fully_shard` was told to ignore are refused by name on all ranks, before any change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_compile import (
    EMA,
    ConfigError,
    fully_shard,
    optim_state_dict,
    optim_state_dict_to_load,
)
from tests.ranks import run_ranks
from tests.fsdp2.models import mesh_of


def _made(seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = mesh_of((2,))
    model[1].experts = nn.Parameter(distribute_tensor(torch.randn(6, 3), mesh, [Shard(0)]))
    return fully_shard(model, mesh=mesh, ignored_params=[model[1].experts])


def _check_averages() -> None:
    saved, ema = EMA(_made(0)).full_state_dict(), EMA(_made(1))
    before = ema.full_state_dict()
    with pytest.raises(ConfigError, match=r"the value is full(.|\n)*1\.experts"):
        ema.load_state_dict(saved)
    assert all(torch.equal(value, before[name]) for name, value in ema.full_state_dict().items())


def _check_optimizer() -> None:
    model = _made(0)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for config in (None, FullOptimStateDictConfig(rank0_only=True)):
        state = optim_state_dict(model, optimizer, config=config)
        with pytest.raises(ConfigError, match=r"'exp_avg' of 1\.experts is full, and the parameter a DTensor"):
            optim_state_dict_to_load(model, optimizer, state, load_directly=True, config=config)
    optimizer.step()


def _check_all() -> None:
    _check_averages()
    _check_optimizer()


def test_full_values_of_ignored_dtensors_are_refused_on_all_ranks() -> None:
    run_ranks(_check_all)
