"""Over which ranks parameters are split, and over which they are copies: FSDP1's five strategies as FSDP2's arguments.

    strategy              mesh                    after forward      reduction
    FULL_SHARD            (shard)                 freed              reduce-scatter
    SHARD_GRAD_OP         (shard)                 kept               reduce-scatter
    NO_SHARD              (replicate, 1)          nothing to free    all-reduce
    HYBRID_SHARD          (replicate, shard)      freed              reduce-scatter, then all-reduce of the shard
    _HYBRID_SHARD_ZERO2   (replicate, shard)      kept               reduce-scatter, then all-reduce of the shard

A mesh over the whole world is made where none is given.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile.comm.failures import remember_world
from fsdp_compile.comm.groups import check_mesh, default_mesh, mesh_of_shape, replicas_only
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.hosts import ranks_per_host

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
RESHARDS = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
"""Strategies by which parameters are freed after forward."""


def mesh_of(strategy: ShardingStrategy | None, mesh: DeviceMesh | None, *, device_type: str) -> DeviceMesh:
    """The mesh that FSDP2 is to shard over, 1-D or (replicate, shard); one over the whole world if none is given.

    Raises:
        ConfigError: If the arguments contradict each other, or the ranks of a machine cannot be counted.
    """
    if strategy is not None and not isinstance(strategy, ShardingStrategy):
        raise ConfigError(
            f"sharding_strategy is {strategy!r}",
            where="fully_shard(sharding_strategy=...)",
            instead="a torch.distributed.fsdp.ShardingStrategy",
        )
    if mesh is None:
        mesh = hybrid_mesh(device_type) if strategy in HYBRID else default_mesh(device_type)
    check_mesh(mesh)
    remember_world()  # this rank may fail before anything is compiled
    wanted = 2 if strategy in HYBRID else 1
    if strategy is not None and mesh.ndim != wanted:
        raise ConfigError(
            f"{strategy} is for a mesh of {wanted} dimension{'s' * (wanted > 1)}, and this one has {mesh.ndim}",
            where="fully_shard(sharding_strategy=..., mesh=...)",
            instead="HYBRID_SHARD for a mesh (replicate, shard); FULL_SHARD, SHARD_GRAD_OP or NO_SHARD for one of one "
            "dimension",
        )
    return replicas_only(mesh) if strategy is ShardingStrategy.NO_SHARD else mesh


def hybrid_mesh(device_type: str) -> DeviceMesh:
    """A mesh (replicate, shard) that shards over the ranks of each machine; equal ones for all calls in a world.

    Raises `ConfigError` if the ranks of a machine cannot be counted, or the world does not divide by their number.
    """
    world = default_mesh(device_type).size()  # starts the world if need be
    shard = ranks_per_host()
    if shard is None:
        shard = 0 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    if not shard:
        raise ConfigError(
            f"it is not known how many ranks share a machine: there is no LOCAL_WORLD_SIZE, and a {device_type} is "
            "not counted",
            where="sharding_strategy=HYBRID_SHARD without a mesh",
            instead="torchrun, which sets LOCAL_WORLD_SIZE, or a mesh (replicate, shard)",
        )
    if world % shard:
        raise ConfigError(
            f"{world} ranks do not divide into machines of {shard}",
            where="sharding_strategy=HYBRID_SHARD without a mesh",
            instead="the same number of ranks on every machine, or a mesh (replicate, shard)",
        )
    return mesh_of_shape(device_type, (world // shard, shard))
