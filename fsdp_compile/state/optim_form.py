"""Which form of an optimizer's state is asked for, in FSDP1's terms: full or sharded, where, and on which ranks."""

from __future__ import annotations

import dataclasses
import enum

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateDictConfig, ShardedOptimStateDictConfig

from fsdp_compile.comm.gather import Receivers, first_rank
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.classes import original_class
from fsdp_compile.runtime.module_state import units_below, unwrap
from fsdp_compile.runtime.split_params import meshes_of
from fsdp_compile.runtime.units import FSDPUnit
from fsdp_compile.state.outside_of_steps import check, refuse_inside_a_step


class Values(enum.Enum):
    """What stands for a sharded parameter's state."""

    FULL = "full"
    """Plain tensors of the parameter's shape."""
    SHARDED = "sharded"
    """DTensors, laid out as the parameter is."""


class Memory(enum.Enum):
    """Where tensors of a state dict are."""

    HOST = "host"
    DEVICE = "device"


@dataclasses.dataclass(frozen=True)
class Form:
    """What a state dict is to be, or is."""

    values: Values
    memory: Memory
    receivers: Receivers


def form_of(config: OptimStateDictConfig | None, where: str) -> Form:
    """What one of torch's configurations asks for; without one FSDP1's default, full values on the host.

    Raises:
        ConfigError: For another configuration.
    """
    chosen = FullOptimStateDictConfig() if config is None else config
    memory = Memory.HOST if getattr(chosen, "offload_to_cpu", True) else Memory.DEVICE
    if isinstance(chosen, FullOptimStateDictConfig):
        return Form(Values.FULL, memory, Receivers.FIRST if chosen.rank0_only else Receivers.ALL)
    if isinstance(chosen, ShardedOptimStateDictConfig):
        return Form(Values.SHARDED, memory, Receivers.ALL)
    raise ConfigError(
        f"config is {chosen!r}",
        where=where,
        instead="torch.distributed.fsdp.FullOptimStateDictConfig(offload_to_cpu=..., rank0_only=...) for full tensors, "
        "or ShardedOptimStateDictConfig(offload_to_cpu=...) for DTensors, whose to_local() is this rank's part",
    )


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A sharded model between two steps."""

    module: nn.Module
    mesh: DeviceMesh
    """The largest one that a unit is on."""
    is_first: bool
    """Whether this is the first rank of it."""


def between_steps(model: nn.Module, form: Form, group: dist.ProcessGroup | None, where: str) -> Sharded:
    """A model whose parameters are sharded now.

    Raises:
        ConfigError: Inside a forward, a backward or `full_params`; if nothing is sharded, or a parameter is on the meta
            device; if `group` has other ranks than the mesh; if one rank is to have all, and which one is not clear.
    """
    module = unwrap(model)
    assert isinstance(module, nn.Module)
    refuse_inside_a_step(
        where, what="an optimizer's state changes inside a step", instead=f"{where} before or after it"
    )
    units = units_below(module)
    if not units:
        raise ConfigError(
            "nothing in this model is sharded",
            where=f"{where} of {original_class(module).__name__}",
            instead="fully_shard(model), or the first call of the compiled model, before; optimizer.state_dict() and "
            "load_state_dict() for a model that stays plain",
        )
    check(units, where, instead=f"{where} before or after full_params()")
    mesh = _mesh(units, form, where)
    if group is not None and set(dist.get_process_group_ranks(group)) != set(mesh.mesh.flatten().tolist()):
        raise ConfigError(
            f"group has ranks {dist.get_process_group_ranks(group)}, and the model is on {mesh}",
            where=where,
            instead="no group: state is gathered over the mesh, whose first rank is the one of rank0_only",
        )
    return Sharded(module, mesh, mesh.get_rank() == mesh.mesh.flatten()[0].item())


def _mesh(units: list[FSDPUnit], form: Form, where: str) -> DeviceMesh:
    meshes = meshes_of(units)
    if form.receivers is Receivers.FIRST:
        first_rank(meshes, where)
    return max(meshes, key=lambda mesh: mesh.size())
