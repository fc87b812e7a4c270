"""Meshes that a call names by dimensions, or parameter by parameter: whole values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_compile
from fsdp_compile import ConfigError, fully_shard
from tests.models.spmd import WIDTH, Spmd
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly

Dims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
Result: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
needs_dims = pytest.mark.skipif(Dims is None, reason="torch has no DataParallelMeshDims")
needs_result = pytest.mark.skipif(Result is None, reason="torch has no ShardPlacementResult")


@needs_dims
@on_ranks(world_size=4)
def test_whole_values_and_norms_of_a_model_over_a_whole_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    torch.manual_seed(0)
    plain = Spmd(1)
    torch.manual_seed(0)
    model = Spmd(1).spread(mesh, "tp", ("data",))
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims("data"))
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    for found in (
        {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)},
        dict(fsdp_compile.full_tensors(model)),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    plain(x).square().mean().backward()
    out: Any = model(x.chunk(2)[mesh.get_local_rank("data")])
    out.to_local().square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(fsdp_compile.clip_grad_norm_(model, 1e9), norm)
    with fsdp_compile.full_params(model):
        weight = model.get_parameter("layers.0.up.weight")
        assert isinstance(weight, DTensor)
        assert weight.placements == (Replicate(), Shard(0))
        with torch.no_grad():
            weight.mul_(2)
    held: Any = model.get_parameter("layers.0.up.weight")
    assert torch.equal(held.full_tensor(), 2 * expected["layers.0.up.weight"])


class _Positioned(nn.Module):
    """A parameter of no dimensions, and one of which each rank of "cp" uses some rows."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.position, self.weight = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        if mesh is not None:
            for name, value in list(self.named_parameters()):
                whole = distribute_tensor(value.detach(), mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
                setattr(self, name, nn.Parameter(whole))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.position) * self.weight * self.scale


@needs_dims
@on_ranks(world_size=4)
def test_a_gradient_that_is_split_over_a_data_parallel_dimension() -> None:
    """Batches are split over "dp", sequences over "cp"; FSDP2 takes the split gradient for one with partial sums."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    reference, model = _Positioned(), _Positioned(mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=Dims(("dp", "cp")))
    call: Any = compile_eagerly(model)
    batch = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(5))
    reference(batch).square().mean().backward()
    own = batch.chunk(2)[mesh.get_local_rank("dp")].chunk(2, dim=1)[mesh.get_local_rank("cp")].contiguous()
    call(DTensor.from_local(own, mesh, [Shard(0), Shard(1)])).to_local().square().mean().backward()
    for name, parameter in reference.named_parameters():
        mine: Any = model.get_parameter(name).grad
        torch.testing.assert_close(mine.full_tensor(), parameter.grad, msg=name)


class _Two(nn.Module):
    """Parameters of one module that belong to two meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dense(x)) * self.scale


@needs_result
@on_ranks(world_size=4)
def test_parameters_of_one_module_on_two_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every = init_device_mesh("cpu", (4,), mesh_dim_names=("every",))
    info = _fsdp_common.FSDPMeshInfo(mesh["dp"], shard_mesh_dim=0)

    def fn(model: _Two) -> Callable[[nn.Parameter], Any]:
        # The expert of each rank of "ep", and the scale, which has no dimension, are its own.
        return lambda p: Result(None, info) if p is model.expert.weight or p is model.scale else None

    torch.manual_seed(0)
    model = _Two()
    own = mesh.get_local_rank("ep")
    with torch.no_grad():
        model.expert.weight.mul_(own + 1)  # other values on ranks that have another expert
        model.scale.add_(own)
    fully_shard(model, mesh=every, shard_placement_fn=fn(model))
    parent = nn.Sequential(model)  # a call above it makes of the split one unit for each mesh
    fully_shard(parent, mesh=every)
    units = sorted(
        (name, parameter.device_mesh.size())
        for name, parameter in parent.named_parameters()
        if isinstance(parameter, DTensor)
    )
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    parent(x).sum().backward()
    assert model.scale.grad is not None
    values = [torch.zeros(()) for _ in range(4)]
    dist.all_gather(values, model.scale.grad)
    units, scales = [units, [v.item() for v in values]]
    assert units == [("0.dense.bias", 4), ("0.dense.weight", 4), ("0.expert.weight", 2)]
    assert scales[0] == scales[2] != scales[1] == scales[3]  # averaged over "dp" alone


def test_a_strategy_and_dimensions_say_the_same_twice(fake_world: Callable[..., Any]) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        both: list[dict[str, Any]] = [{"mesh": mesh, "sharding_strategy": ShardingStrategy.FULL_SHARD}, {}]
        for given in both:
            with pytest.raises(ConfigError, match="a mesh with it, and no sharding_strategy"):
                fully_shard(nn.Linear(4, 4), dp_mesh_dims=Dims("data") if Dims else "data", **given)
