"""Which dimension of a parameter is divided over the ranks of the shard group."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdp_compile.errors import ConfigError
from fsdp_compile.sharding.arguments import PlacementFn


def shard_dim(
    name: str, parameter: nn.Parameter, size: int, placement: PlacementFn | None, shape: torch.Size | None = None
) -> int | None:
    """The dimension on which a parameter is sharded.

    Args:
        name: Of the parameter, for errors.
        parameter: What `placement` is asked about.
        size: Ranks in the shard group.
        placement: The user's choice.
        shape: Of what is divided, if that is a part of the parameter.

    Raises:
        ConfigError: If `shard_placement_fn` returns no `Shard`, or names a dimension that does not exist, or one other
            than 0 that the group does not divide.
    """
    if parameter.dim() == 0:
        return None
    chosen = placement(parameter) if placement is not None else None
    if chosen is None:
        return 0
    where = f"shard_placement_fn, parameter {name} of shape {tuple(parameter.shape)}"
    if hasattr(chosen, "mesh_info"):
        raise ConfigError(
            "it returned a ShardPlacementResult, and the parameters of one call are on one mesh",
            where=where,
            instead="fully_shard(module, mesh=...) of the module whose parameters are on another mesh (the experts, "
            "say), before the call on the module that contains it",
        )
    if not isinstance(chosen, Shard):
        raise ConfigError(f"it returned {chosen!r}", where=where, instead="Shard(dim), or None for Shard(0)")
    dim = chosen.dim + parameter.dim() if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < parameter.dim():
        raise ConfigError(f"{chosen!r} names a dimension that does not exist", where=where, instead="Shard(0)")
    divided = (parameter.shape if shape is None else shape)[dim]
    if dim > 0 and divided % size:
        raise ConfigError(
            f"dimension {dim} of size {divided} does not divide over {size} ranks",
            where=where,
            instead="Shard(0), which pads, or a dimension that divides",
        )
    return dim
