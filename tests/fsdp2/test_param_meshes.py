"""`ShardPlacementResult`: parameters of one call on several meshes, compiled: what FSDP2 makes of them uncompiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from tests import long
from tests.models.experts import WIDTH, MixtureOfExperts
from tests.ranks import on_ranks
from tests.two_sides import WithFsdp2, Within, sgd

RANKS, TOKENS, STEPS = 4, 10, 3
Result: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
pytestmark = pytest.mark.skipif(Result is None, reason="torch has no ShardPlacementResult")
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "unsharded until backward": {"reshard_after_forward": False},
    "two neighbours": {"reshard_after_forward": 2},
    "replicas": {"experts": "replicas"},
    "plain experts": {"experts": "plain"},
}


def _fn(layer: Any, chosen: Any, dim: int = 1) -> Callable[[nn.Parameter], Any]:
    experts = {id(p) for p in layer.experts.parameters()}
    return lambda p: Result(Shard(dim), chosen) if id(p) in experts else None


def _shard(model: MixtureOfExperts, experts: str = "split", **arguments: Any) -> None:
    """Each layer in one call: its experts over the ranks that have the same ones, the rest over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("every",))
    over: DeviceMesh = mesh["dp"]
    info: Any = _fsdp_common.FSDPMeshInfo(over, shard_mesh_dim=0)
    if experts == "replicas":
        info = _fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    for layer in model.layers:
        part: Any = layer.experts
        if experts == "split":
            part.split(mesh["ep"])
        elif experts == "plain":  # as DeepSeek's and Megatron's models have them: each rank its own, of smaller shape
            part.split(mesh["ep"])
            for name in ("up", "down"):
                setattr(part, name, nn.Parameter(getattr(part, name).to_local().detach().clone()))
        fully_shard(layer, mesh=every, shard_placement_fn=_fn(layer, info), **arguments)
    fully_shard(model, mesh=every, **arguments)


def _make() -> MixtureOfExperts:
    model = MixtureOfExperts()
    del model.layers[1:]  # four ranks compile at the same time, on few cores
    model.last = nn.Linear(WIDTH, WIDTH)  # an even number of elements for each rank: else gloo adds in another order
    return model


def _batch(step: int) -> torch.Tensor:
    return torch.randn(RANKS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))[dist.get_rank()]


@long.parametrize("name", CASES, always=["defaults"])
@on_ranks(world_size=RANKS)
def test_compiled(name: str) -> None:
    pair = WithFsdp2(_make, functools.partial(_shard, **CASES[name]), _batch, optimizer=sgd)
    # Compiled, AOTAutograd adds the gradients of several experts in another order.
    bound = (1e-6, 1e-6)
    pair.train(pair.compiled(fullgraph=False), steps=STEPS, within=Within(bound, bound, bound))
