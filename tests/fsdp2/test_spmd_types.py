"""Parameters with `spmd_types`, which FSDP2 knows since torch 2.14: its hooks gather them in compiled models, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from tests.fsdp2.mlp import only_hooks, pair_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.optional
pytest.importorskip("spmd_types")
if not hasattr(FSDPParam, "_resolve_spmd_types_for_storage"):
    pytest.skip("FSDP2 knows no spmd_types before torch 2.14", allow_module_level=True)


@on_ranks(world_size=4)
def test_numbers_are_those_of_fsdp2() -> None:
    import spmd_types as spmd
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def shard(model: Any) -> None:
        # Both ranks of "tp" use the whole layer for tokens of their own: the sum over them is FSDP2's.
        for parameter in model.layers[1].parameters():
            spmd.assert_type(parameter, {mesh.get_group("tp"): spmd.R, mesh.get_group("dp"): spmd.R})
        for module in (*model.layers, model):
            if module is model.layers[1]:
                fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
            else:
                fully_shard(module, mesh=mesh["dp"])

    pair = pair_of(sharded=shard)
    for _ in range(2):
        pair.backward()
        grad = pair.model.layers[1].weight.grad
        over_tp = [torch.empty_like(grad.to_local()) for _ in range(2)]
        dist.all_gather(over_tp, grad.to_local(), mesh.get_group("tp"))
        assert torch.equal(*over_tp)
        pair.compare_gradients()
        pair.zero_grad()
    assert only_hooks(pair.model) == ["", "", "spmd_types of a parameter"]
