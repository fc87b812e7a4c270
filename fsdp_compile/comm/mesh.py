"""Over which ranks parameters are split, over which they are copies, and what happens to them between the passes.

FSDP1's five strategies and FSDP2's mesh with `reshard_after_forward` are two ways to write down the same few numbers:

    strategy              mesh                    after forward      reduction
    FULL_SHARD            (shard)                 freed              reduce-scatter
    SHARD_GRAD_OP         (shard)                 kept               reduce-scatter
    NO_SHARD              (replicate)             nothing to free    all-reduce
    HYBRID_SHARD          (replicate, shard)      freed              reduce-scatter, then all-reduce of the shard
    _HYBRID_SHARD_ZERO2   (replicate, shard)      kept               reduce-scatter, then all-reduce of the shard
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Replicate, Shard

from fsdp_compile.comm.groups import alias_of, check_mesh, default_mesh, mesh_of_shape, run_of
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.hosts import ranks_per_host
from fsdp_compile.layout.spec import Reshard

ReshardAfterForward = bool | int | Literal["auto"]
"""What `fully_shard(reshard_after_forward=...)` takes, besides `None` for its default."""
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_KEEPS = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclasses.dataclass(frozen=True)
class MeshPlacement:
    """Over which ranks the parameters of a unit are sharded and replicated, and when they are resharded.

    Attributes:
        shard_dim: The dimension of `mesh` over which they are sharded; `None` if they are not.
        replicate_dim: The dimension of `mesh` over which they are replicated; `None` if they are not.
        post_forward_size: Neighbours that together keep unsharded parameters for backward, a part each; 1 if none do.
    """

    mesh: DeviceMesh
    shard_dim: int | None
    replicate_dim: int | None
    reshard: Reshard
    post_forward_size: int = 1

    @property
    def size(self) -> int:
        """Ranks in the shard group."""
        return 1 if self.shard_dim is None else self.mesh.size(self.shard_dim)

    @property
    def rank(self) -> int:
        """This rank's place in the shard group."""
        return 0 if self.shard_dim is None else self.mesh.get_local_rank(self.shard_dim)

    @property
    def replicas(self) -> int:
        """Ranks in the replicate group."""
        return 1 if self.replicate_dim is None else self.mesh.size(self.replicate_dim)

    def stride(self, dim: int | None) -> int:
        """Distance of neighbours along a dimension of the mesh, in ranks of the world; 1 where there are none."""
        if dim is None:
            return 1
        steps = self.mesh.mesh.diff(dim=dim)  # of all its groups, so that every rank finds the same
        return int(steps.abs().max()) if steps.numel() else 1

    def post_forward_alias(self) -> str:
        """Name of the group that keeps unsharded parameters together, empty if none do; all ranks call this."""
        if self.post_forward_size == 1:
            return ""
        return alias_of(run_of(self.mesh.get_group(self.shard_dim), self.post_forward_size), "post_forward")

    @property
    def reshard_after_forward(self) -> ReshardAfterForward:
        """FSDP2's argument that says so."""
        if self.reshard is Reshard.AFTER_FORWARD:
            return self.post_forward_size if self.post_forward_size > 1 else True
        return "auto" if self.reshard is Reshard.AUTO else False

    def placements(self, dim: int | None) -> tuple[Shard | Replicate, ...]:
        """Placements of a DTensor that is sharded on `dim`; `None` for a 0-d one, which every rank has whole."""
        split = Replicate() if dim is None else Shard(dim)
        return tuple(split if d == self.shard_dim else Replicate() for d in range(self.mesh.ndim))


def mesh_placement(
    strategy: ShardingStrategy | None,
    mesh: DeviceMesh | None,
    *,
    reshard_after_forward: ReshardAfterForward | None,
    device_type: str,
) -> MeshPlacement:
    """The mesh placement that the arguments of `fully_shard` ask for.

    Args:
        strategy: FSDP1's name; `None` for `mesh` and `reshard_after_forward`.
        mesh: As for `fully_shard`; `None` for one over the whole world.
        reshard_after_forward: As for `fully_shard`.
        device_type: Of the mesh that is made if there is none.

    Raises:
        ConfigError: If the arguments contradict each other, or the ranks of a machine cannot be counted.
    """
    if strategy is None:
        mesh = default_mesh(device_type) if mesh is None else mesh
        check_mesh(mesh)
        return with_reshard(_of_mesh(mesh), reshard_after_forward=reshard_after_forward)
    if not isinstance(strategy, ShardingStrategy):
        raise ConfigError(
            f"sharding_strategy is {strategy!r}",
            where="fully_shard(sharding_strategy=...)",
            instead="a torch.distributed.fsdp.ShardingStrategy",
        )
    if reshard_after_forward is not None:
        raise ConfigError(
            f"{strategy} says already what happens after forward, and reshard_after_forward={reshard_after_forward!r} "
            "says it again",
            where="fully_shard(sharding_strategy=..., reshard_after_forward=...)",
            instead="one of the two",
        )
    wanted = 2 if strategy in HYBRID else 1
    if mesh is None:
        mesh = hybrid_mesh(device_type) if strategy in HYBRID else default_mesh(device_type)
    check_mesh(mesh)
    if mesh.ndim != wanted:
        raise ConfigError(
            f"{strategy} is for a mesh of {wanted} dimension{'s' * (wanted > 1)}, and this one has {mesh.ndim}",
            where="fully_shard(sharding_strategy=..., mesh=...)",
            instead="HYBRID_SHARD for a mesh (replicate, shard); FULL_SHARD, SHARD_GRAD_OP or NO_SHARD for one of one "
            "dimension",
        )
    if strategy is ShardingStrategy.NO_SHARD:
        return MeshPlacement(mesh, None, 0, Reshard.AFTER_FORWARD)
    return with_reshard(_of_mesh(mesh), reshard_after_forward=strategy not in _KEEPS)


def with_reshard(placement: MeshPlacement, *, reshard_after_forward: ReshardAfterForward | None) -> MeshPlacement:
    """The same ranks with FSDP2's argument; raises `ConfigError` if a number does not divide the shard group."""
    size, post_forward_size = placement.size, 1
    keeps = reshard_after_forward is False
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        # 1 keeps all on each rank, which is False; the group's size keeps the shards, which is True.
        post_forward_size, keeps = reshard_after_forward, reshard_after_forward == 1 < size
        if post_forward_size < 1 or size % post_forward_size:
            raise ConfigError(
                f"reshard_after_forward={post_forward_size} does not divide the {size} ranks that parameters "
                "are sharded over",
                where="fully_shard(reshard_after_forward=...)",
                instead=f"one of {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}, True or False",
            )
    reshard = Reshard.AFTER_BACKWARD if keeps else Reshard.AFTER_FORWARD
    reshard = Reshard.AUTO if reshard_after_forward == "auto" else reshard
    return dataclasses.replace(
        placement, reshard=reshard, post_forward_size=1 if post_forward_size == size else post_forward_size
    )


def _of_mesh(mesh: DeviceMesh) -> MeshPlacement:
    return MeshPlacement(mesh, mesh.ndim - 1, 0 if mesh.ndim == 2 else None, Reshard.AFTER_FORWARD)


def hybrid_mesh(device_type: str) -> DeviceMesh:
    """A mesh (replicate, shard) that shards over the ranks of each machine; equal ones for all calls in a world.

    Raises:
        ConfigError: If the ranks of a machine cannot be counted, or the world does not divide by their number.
    """
    world = default_mesh(device_type).size()  # starts the world if need be
    shard = _ranks_per_machine(device_type)
    if world % shard:
        raise ConfigError(
            f"{world} ranks do not divide into machines of {shard}",
            where="sharding_strategy=HYBRID_SHARD without a mesh",
            instead="the same number of ranks on every machine, or a mesh (replicate, shard)",
        )
    return mesh_of_shape(device_type, (world // shard, shard))


def _ranks_per_machine(device_type: str) -> int:
    told = ranks_per_host()
    if told is not None:
        return told
    count = 0 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    if not count:
        raise ConfigError(
            f"it is not known how many ranks share a machine: there is no LOCAL_WORLD_SIZE, and a {device_type} is "
            "not counted",
            where="sharding_strategy=HYBRID_SHARD without a mesh",
            instead="torchrun, which sets LOCAL_WORLD_SIZE, or a mesh (replicate, shard)",
        )
    return count
