"""Which parameters with all-gather extensions can be sharded, and what their methods will be called with."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import local_tensor
from fsdp_compile.comm.gather_extension import GatherExtension, is_extended, part_of
from fsdp_compile.errors import ConfigError, FSDPCompileError, UnsupportedModelError
from fsdp_compile.runtime import extended_reads
from fsdp_compile.runtime.group_state import UnitPolicy
from fsdp_compile.sharding.arguments import InitFrom

_INSTEAD = "a plain parameter; or list it in ignored_params, then it is neither sharded nor averaged"


def refuse(name: str, parameter: torch.Tensor, dim: int | None, policy: UnitPolicy, source: InitFrom) -> None:
    """Raises an error for a parameter with an all-gather extension that cannot be sharded as its unit is.

    Args:
        name: Of the parameter in the module that is sharded.
        parameter: Not sharded by this package.
        dim: The dimension to shard.
        policy: Of its unit.
        source: Whose values count.

    Raises:
        ConfigError: If an option of the unit does not go with it.
        UnsupportedModelError: If it cannot be divided, or not as one of its class.
    """
    if source is InitFrom.SHARDS:
        assert isinstance(parameter, DTensor)
        if is_extended(local_tensor(parameter)):
            _refuse_option(name, dim, policy, source)
        return
    if isinstance(parameter, DTensor):
        if is_extended(local_tensor(parameter)):
            raise _unsupported(name, parameter, "is a DTensor of a tensor subclass (tensor parallelism)")
        return
    if not is_extended(parameter):
        return
    if dim is None or not parameter.is_contiguous():
        raise _unsupported(name, parameter, "has no dimension" if dim is None else "is not contiguous")
    _refuse_option(name, dim, policy, source)
    # What is wrapped is divided by the class itself.
    part = part_of(parameter.detach(), max(policy.size, 2), 0)
    if type(part) is not type(parameter):
        raise _unsupported(name, parameter, f"is divided by torch.chunk() into {type(part).__name__}s")


def _refuse_option(name: str, dim: int | None, policy: UnitPolicy, source: InitFrom) -> None:
    placement = policy.mesh_placement
    wrong = None
    if dim != 0:
        wrong = (f"it is sharded on dimension {dim}", "shard_placement_fn", "Shard(0) for it")
    elif source is InitFrom.FIRST_RANK:
        wrong = ("its values are sent by the first rank", "sync_module_states", "the same values on every rank")
    elif policy.offload is not None:
        wrong = ("its shard is offloaded", "offload_policy", "no offload for its module")
    elif placement.shard_dim is None:
        wrong = ("it is replicated", "sharding_strategy=NO_SHARD", "FULL_SHARD or SHARD_GRAD_OP")
    elif placement.post_forward_size > 1:
        wrong = ("a part of it is saved for backward", "reshard_after_forward", "True or False")
    elif placement.mesh.ndim > 1 and placement.mesh.mesh_dim_names is None:
        wrong = ("its dimensions have no names, by which methods get that of the shards", "mesh", "mesh_dim_names=...")
    if wrong is not None:
        raise ConfigError(
            f"a parameter says by itself how it is gathered (an all-gather extension), and {wrong[0]}",
            where=f"fully_shard({wrong[1]}), {name}",
            instead=wrong[2],
        )


def _unsupported(name: str, parameter: torch.Tensor, what: str) -> FSDPCompileError:
    kind = type(parameter)
    return UnsupportedModelError(
        f"a parameter of class {kind.__module__}.{kind.__qualname__} {what}", where=name, instead=_INSTEAD
    )


def extension_of(
    name: str, places: Sequence[tuple[nn.Module, str]], parameter: torch.Tensor, dim: int | None, policy: UnitPolicy
) -> GatherExtension | None:
    """The extension of a parameter that `refuse` accepts, or whose shard got its methods later; `None` if it has none.

    Args:
        name: Of the parameter, for errors.
        places: Every (module, attribute) that registers it.
        parameter: Full or sharded.
        dim: The dimension that is sharded.
        policy: Of its unit.

    Raises:
        ConfigError: If an option of the unit does not go with it.
    """
    if not is_extended(local_tensor(parameter) if isinstance(parameter, DTensor) else parameter):
        return None
    _refuse_option(name, dim, policy, InitFrom.EACH_RANK)
    mesh = _shard_mesh(policy)
    asked = policy.mixed_precision
    return GatherExtension(
        name,
        extended_reads.new_key(name),
        mesh,
        # By torch's name: in graphs these are collectives of the program, not of the passes.
        mesh.get_group().group_name if mesh.size() > 1 else "",
        parameter.shape,
        weakref.ref(places[0][0]),
        MixedPrecisionPolicy(asked.param_dtype, asked.reduce_dtype, asked.output_dtype, asked.cast_forward_inputs),
    )


def _shard_mesh(policy: UnitPolicy) -> DeviceMesh:
    mesh, dim = policy.mesh, policy.mesh_placement.shard_dim
    assert dim is not None
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[dim]]  # type: ignore[index]
