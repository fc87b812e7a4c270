"""Full values of DTensors that `fully_shard` was told to ignore are cut as these are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_compile import EMA, fully_shard, optim_state_dict, optim_state_dict_to_load
from tests.fsdp2.models import assert_same, mesh_of
from tests.ranks import on_ranks


def _made(seed: int) -> Any:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = mesh_of((2,))
    model[1].experts = nn.Parameter(distribute_tensor(torch.randn(6, 3), mesh, [Shard(0)]))
    return fully_shard(model, mesh=mesh, ignored_params=[model[1].experts])


def _trained(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = _made(seed)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 2
    optimizer.step()
    return model, optimizer


@on_ranks()
def test_full_values_of_ignored_dtensors_are_cut_as_they_are() -> None:
    saved, ema = EMA(_made(0)).full_state_dict(), EMA(_made(1))
    ema.load_state_dict(saved)
    assert_same(ema.full_state_dict(), saved)
    for config in (None, FullOptimStateDictConfig(rank0_only=True)):
        model, optimizer = _trained(0)
        other_model, other = _trained(1)
        state = optim_state_dict(model, optimizer, config=config)
        optim_state_dict_to_load(other_model, other, state, load_directly=True, config=config)
        for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
            assert_same(mine, theirs)
            assert all(isinstance(mine[key], DTensor) == isinstance(value, DTensor) for key, value in theirs.items())
