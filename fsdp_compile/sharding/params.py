"""Which parameters FSDP2 can shard: others stay whole, or are refused by name before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter

from fsdp_compile._torch.fully_shard_calls import chosen_mesh
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.sharding.arguments import PlacementFn, UnitPolicy

_IGNORE = "list it in ignored_params, then it is neither sharded nor averaged"


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 has no way to split a parameter: 0-d, empty, or of integers."""
    return parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_floating_point()


def refuse_params(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises an error for a parameter that can be neither sharded nor replicated.

    Raises:
        ConfigError: If it has no shape yet.
        UnsupportedModelError: If it is complex, or its elements are not contiguous.
    """
    for name, parameter in named:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                "a parameter of a lazy module has no shape yet",
                where=name,
                instead="call the plain model once on a batch, then shard it",
            )
        if parameter.is_complex():
            raise UnsupportedModelError(
                f"a parameter is complex, of {parameter.dtype}, and FSDP2 reduces real numbers",
                where=name,
                instead=f"a parameter of torch.view_as_real() of it, or {_IGNORE}",
            )
        if not is_whole(parameter) and not parameter.is_contiguous():
            raise UnsupportedModelError(
                f"a parameter is not contiguous: shape {tuple(parameter.shape)}, strides {parameter.stride()}",
                where=name,
                instead=f"a contiguous one, as nn.Parameter(p.contiguous()) makes it, or {_IGNORE}",
            )


def placements(
    named: Iterable[tuple[str, nn.Parameter]], placement_fn: PlacementFn | None, policy: UnitPolicy
) -> dict[nn.Parameter, Any]:
    """What `placement_fn` returns for each parameter; nothing without one.

    Raises:
        ConfigError: If it returns what is no placement, or a dimension that does not exist.
        UnsupportedModelError: If a dimension other than the first does not divide over the ranks.
    """
    results: dict[nn.Parameter, Any] = {}
    for name, parameter in named if placement_fn is not None else ():
        assert placement_fn is not None
        result = results[parameter] = placement_fn(parameter)
        own_mesh = chosen_mesh(result)
        placement = result if own_mesh is None else own_mesh.placement
        where = f"shard_placement_fn, parameter {name} of shape {tuple(parameter.shape)}"
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            raise ConfigError(
                f"it returned {placement!r}",
                where=where,
                instead="Shard(dim), None for Shard(0), or from torch 2.12 on a ShardPlacementResult for another mesh",
            )
        dim = placement.dim + parameter.dim() if placement.dim < 0 else placement.dim
        if not 0 <= dim < parameter.dim():
            raise ConfigError(f"{placement!r} names a dimension that does not exist", where=where, instead="Shard(0)")
        mesh, mesh_dim = (policy.mesh, policy.mesh_dims()[-1])
        if own_mesh is not None:
            mesh, mesh_dim = own_mesh.mesh, own_mesh.shard_dim or 0
        shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        if dim > 0 and shape[dim] % mesh.size(mesh_dim):
            raise UnsupportedModelError(
                f"dimension {dim} of size {shape[dim]} does not divide over {mesh.size(mesh_dim)} ranks",
                where=where,
                instead="Shard(0), which pads, or a dimension that divides",
            )
    return results
