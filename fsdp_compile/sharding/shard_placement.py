"""What `shard_placement_fn` says of parameters: the dimension that is sharded, and over which ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_compile._torch.mesh_info import ChosenMesh, chosen_mesh
from fsdp_compile.comm.mesh import MeshPlacement, mesh_placement
from fsdp_compile.errors import ConfigError

PlacementFn = Callable[[nn.Parameter], Any]
"""Gives a `Shard`, torch's `ShardPlacementResult`, or `None` for `Shard(0)` over the mesh of the call."""
_FN = "shard_placement_fn"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What it says of one parameter.

    Attributes:
        placement: A `Shard`, `None` for the first dimension, or what is neither, which `shard_dim` refuses.
        ranks: Those of its own mesh, whatever happens after forward; `None` for the mesh of the call.
    """

    placement: object = None
    ranks: MeshPlacement | None = None


def choices(params: Iterable[tuple[str, nn.Parameter]], placement_fn: PlacementFn | None) -> dict[int, Choice]:
    """What it says of each parameter, by `id`; parameters of 0 dimensions are only asked about where meshes differ.

    Raises:
        ConfigError: If it chooses a mesh that parameters cannot be sharded over.
    """
    if placement_fn is None:
        return {}
    params = list(params)
    found = {id(p): _read(name, p, placement_fn) for name, p in params if p.dim()}
    if any(choice.ranks is not None for choice in found.values()):
        found |= {id(p): _read(name, p, placement_fn) for name, p in params if not p.dim()}
    return found


def _read(name: str, parameter: nn.Parameter, placement_fn: PlacementFn) -> Choice:
    result = placement_fn(parameter)
    chosen = chosen_mesh(result)
    if chosen is None:
        return Choice(result)
    return Choice(chosen.placement, _ranks(chosen, f"{_FN}, parameter {name} of shape {tuple(parameter.shape)}"))


def _ranks(chosen: ChosenMesh, where: str) -> MeshPlacement:
    if chosen.dp_mesh_dims is not None:
        return mesh_placement(
            None, chosen.spmd_mesh, reshard_after_forward=None, device_type="", dp_mesh_dims=chosen.dp_mesh_dims
        )
    mesh = chosen.mesh
    dims = {1: (0, None), 2: (1, 0)}.get(mesh.ndim) if isinstance(mesh, DeviceMesh) else None
    if dims != (chosen.shard_dim, chosen.replicate_dim):
        raise ConfigError(
            f"it returned a ShardPlacementResult with the mesh {mesh}, to shard over dimension {chosen.shard_dim} and "
            f"with replicas over {chosen.replicate_dim}",
            where=where,
            instead="FSDPMeshInfo(mesh, shard_mesh_dim=0) of a 1-D mesh, or HSDPMeshInfo(mesh, shard_mesh_dim=1, "
            "replicate_mesh_dim=0) of a 2-D one",
        )
    return mesh_placement(None, mesh, reshard_after_forward=None, device_type=mesh.device_type)


def shard_dim(
    name: str, parameter: nn.Parameter, size: int, placement: object, shape: torch.Size | None = None
) -> int | None:
    """The dimension on which a parameter is sharded.

    Args:
        name: Of the parameter, for errors.
        parameter: Of which a dimension is chosen.
        size: Ranks in the shard group.
        placement: The user's choice; `None` for the first dimension.
        shape: Of what is divided, if that is a part of the parameter.

    Raises:
        ConfigError: If the choice is no `Shard`, or names a dimension that does not exist, or one other than 0 that the
            group does not divide.
    """
    if parameter.dim() == 0:
        return None
    if placement is None:
        return 0
    where = f"{_FN}, parameter {name} of shape {tuple(parameter.shape)}"
    if not isinstance(placement, Shard):
        raise ConfigError(
            f"it returned {placement!r}",
            where=where,
            instead="Shard(dim), None for Shard(0), or from torch 2.12 on a ShardPlacementResult for another mesh",
        )
    dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.dim():
        raise ConfigError(f"{placement!r} names a dimension that does not exist", where=where, instead="Shard(0)")
    divided = (parameter.shape if shape is None else shape)[dim]
    if dim > 0 and divided % size:
        raise ConfigError(
            f"dimension {dim} of size {divided} does not divide over {size} ranks",
            where=where,
            instead="Shard(0), which pads, or a dimension that divides",
        )
    return dim
