"""Private names of torch's `fully_shard`: the mesh that `shard_placement_fn` may choose for a parameter."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.fsdp._fully_shard import _fsdp_common

_RESULT: Any = getattr(_fsdp_common, "ShardPlacementResult", ())
"""Its result with a mesh, which torch has from 2.12 on."""


@dataclasses.dataclass(frozen=True)
class ChosenMesh:
    """What a `ShardPlacementResult` says.

    Attributes:
        placement: Its `Shard`, or `None`.
        mesh: The mesh of its `FSDPMeshInfo`.
        shard_dim: The dimension of `mesh` to shard over, if there is one.
        replicate_dim: That of replicas.
        dp_mesh_dims: As for `fully_shard`, if `mesh` was made of `spmd_mesh`.
        spmd_mesh: The whole mesh of such parameters.
    """

    placement: object
    mesh: Any
    shard_dim: int | None
    replicate_dim: int | None
    dp_mesh_dims: object
    spmd_mesh: Any


def chosen_mesh(result: object) -> ChosenMesh | None:
    """What a result of `shard_placement_fn` says of a mesh; `None` if it is no `ShardPlacementResult`."""
    if not isinstance(result, _RESULT):
        return None
    of: Any = result
    names = ("mesh", "shard_mesh_dim", "replicate_mesh_dim", "dp_mesh_dims", "spmd_mesh")
    return ChosenMesh(of.placement, *(getattr(of.mesh_info, name, None) for name in names))
