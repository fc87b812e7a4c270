"""Compiled stages of torch's pipeline schedules, which call methods of `FSDPModule`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from tests import long
from tests.models.layers import Residual
from tests.ranks import on_ranks
from tests.two_sides import compare_gradients, compile_in_place


@long.parametrize("stages_per_rank", [1, 2], always=[])
@on_ranks(world_size=4)
def test_pipeline_stages_reduce_once_and_reshard(stages_per_rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    place, data = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    torch.manual_seed(0)
    reference = nn.Sequential(*[Residual(8, 8) for _ in range(2 * stages_per_rank)])
    mine: list[Any] = copy.deepcopy([reference[place + 2 * i] for i in range(stages_per_rank)])
    batch, target = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))
    for stage in mine:
        fully_shard(stage.up, mesh=mesh["data"])
        compile_in_place(fully_shard(stage, mesh=mesh["data"]))
    group = mesh.get_group("pipeline")
    stages: list[Any] = [
        PipelineStage(m, place + 2 * i, 2 * stages_per_rank, torch.device("cpu"), group=group)
        for i, m in enumerate(mine)
    ]
    if stages_per_rank == 1:
        schedule: Any = Schedule1F1B(stages[0], 4, loss_fn=F.mse_loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=F.mse_loss)
    for _ in range(2):
        reference.zero_grad()
        for model in mine:
            model.zero_grad()
        inputs = (batch.chunk(2)[data],) if place == 0 else ()
        schedule.step(*inputs, target=target.chunk(2)[data] if place == 1 else None)
        F.mse_loss(reference(batch), target).backward()
        for i, model in enumerate(mine):
            compare_gradients(model, reference[place + 2 * i])
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
