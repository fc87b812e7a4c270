"""The arguments of one call of `fully_shard`, read and checked before anything is changed."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile.comm.mesh import mesh_placement, with_reshard
from fsdp_compile.config.policy import (
    AnyOffloadPolicy,
    AnyPrecisionPolicy,
    MixedPrecision,
    Offload,
    WrapPolicy,
    as_mixed_precision,
    as_offload,
)
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.group_state import ReduceGroup, UnitPolicy
from fsdp_compile.sharding import checks, devices
from fsdp_compile.sharding.checks import Ignored, refuse_reshard
from fsdp_compile.sharding.devices import Device
from fsdp_compile.sharding.shard_placement import PlacementFn

InitFn = Callable[[nn.Module], object]


class InitFrom(enum.Enum):
    """Whose values count when a model is sharded or initialized."""

    EACH_RANK = "each rank"
    """Every rank shards its own values."""
    FIRST_RANK = "first rank"
    """Every rank gets its part of the values of the first rank of the mesh (`sync_module_states=True`)."""
    SHARDS = "shards"
    """Parameters are sharded already: torch's `fully_shard` did it, or left them to be ignored."""

    @classmethod
    def of(cls, sync_module_states: object) -> InitFrom:
        """The member for FSDP1's flag; raises `ConfigError` if it is no bool."""
        if not isinstance(sync_module_states, bool):
            raise ConfigError(
                f"sync_module_states is {sync_module_states!r}",
                where="fully_shard(sync_module_states=...)",
                instead="True or False, the same on every rank",
            )
        return cls.FIRST_RANK if sync_module_states else cls.EACH_RANK


def whole(modules: Sequence[nn.Module]) -> nn.Module:
    """One module in which all of `modules` are: a single one itself, several by their numbers."""
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


_OVERRIDES = ("sharding_strategy", "reshard_after_forward", "mesh", "mp_policy")


@dataclasses.dataclass(frozen=True)
class UnitArguments:
    """The arguments of `fully_shard` that a unit's policy is made of.

    Attributes:
        strategy: FSDP1's name.
        device_type: Of a mesh that has to be made.
        dp_mesh_dims: Which dimensions of `mesh` are data-parallel, if it is a larger one.
    """

    strategy: ShardingStrategy | None
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | Literal["auto"] | None
    precision: MixedPrecision
    device_type: str
    offload: Offload | None
    dp_mesh_dims: object = None

    def policy(self) -> UnitPolicy:
        """The policy of a unit without overrides; raises `ConfigError` if arguments contradict each other."""
        placement = mesh_placement(
            self.strategy,
            self.mesh,
            reshard_after_forward=self.reshard_after_forward,
            device_type=self.device_type,
            dp_mesh_dims=self.dp_mesh_dims,
        )
        return UnitPolicy(placement, self.precision, self.offload)

    def overridden(self, overrides: Mapping[str, Any]) -> UnitPolicy:
        """The policy of a unit for which a wrap policy returned `overrides`.

        Raises:
            ConfigError: For an unknown name, a value of the wrong type, or arguments that contradict each other.
        """
        for name in overrides:
            if name not in _OVERRIDES:
                near = difflib.get_close_matches(str(name), _OVERRIDES, n=1)
                raise ConfigError(
                    f"the wrap policy returned {name!r}, which no unit can have of its own",
                    where="auto_wrap_policy",
                    instead=repr(near[0]) if near else f"one of {', '.join(_OVERRIDES)}",
                )
        precision = as_mixed_precision(overrides["mp_policy"]) if "mp_policy" in overrides else self.precision
        kept = overrides.get("reshard_after_forward")
        refuse_reshard(kept)
        # Either takes the place of all that the call says about resharding after forward.
        if "sharding_strategy" in overrides or "mesh" in overrides:
            if self.dp_mesh_dims is not None:
                raise ConfigError(
                    "the wrap policy returned other ranks for a unit, and dp_mesh_dims has named those of all units",
                    where="auto_wrap_policy, fully_shard(dp_mesh_dims=...)",
                    instead="one of the two, or a call of fully_shard for that module",
                )
            strategy, mesh = overrides.get("sharding_strategy", self.strategy), overrides.get("mesh", self.mesh)
            placement = mesh_placement(strategy, mesh, reshard_after_forward=kept, device_type=self.device_type)
            return UnitPolicy(placement, precision, self.offload)
        policy = self.policy()
        placement = (
            policy.mesh_placement if kept is None else with_reshard(policy.mesh_placement, reshard_after_forward=kept)
        )
        return UnitPolicy(placement, precision, self.offload)


@dataclasses.dataclass(frozen=True)
class UnitChoices:
    """The arguments of `fully_shard` about units, not checked yet."""

    sharding_strategy: ShardingStrategy | None
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | Literal["auto"] | None
    mp_policy: AnyPrecisionPolicy
    offload_policy: AnyOffloadPolicy
    dp_mesh_dims: object = None


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The checked arguments of one call of `fully_shard`.

    Attributes:
        policy: Of a unit without overrides.
        modules: The modules of the call, none in another one of them.
        is_list: Whether the call is on a list of modules, which become one unit.
        device: Where shards and buffers go that are on the CPU or on meta; `None` leaves them.
        placement: Which dimension of a parameter is sharded, and over which mesh.
        wrap_policy: Which modules become units; `None` for the automatic split.
        init_fn: Initializes what is on meta.
    """

    modules: tuple[nn.Module, ...]
    is_list: bool
    unit: UnitArguments
    policy: UnitPolicy
    ignored: Ignored
    device: torch.device | None
    init_from: InitFrom
    placement: PlacementFn | None
    wrap_policy: WrapPolicy | None
    init_fn: InitFn | None
    reduce_group: ReduceGroup

    @staticmethod
    def read(  # noqa: PLR0913  fully_shard's arguments
        target: nn.Module | Sequence[nn.Module],
        choices: UnitChoices,
        *,
        ignored_params: object,
        device_id: Device | None,
        shard_placement_fn: PlacementFn | None,
        auto_wrap_policy: WrapPolicy | None,
        param_init_fn: InitFn | None,
        sync_module_states: object,
        separate_reduce_group: bool,
    ) -> Arguments:
        """Checks the arguments of `fully_shard`, and makes the mesh if there is none; changes nothing of the module."""
        modules = checks.roots_of(target)
        is_list = not isinstance(target, nn.Module)
        checks.refuse_policy_for_list(auto_wrap_policy, is_list=is_list)
        checks.refuse_reshard(choices.reshard_after_forward)
        offload = as_offload(choices.offload_policy)
        init_from = InitFrom.of(sync_module_states)
        checks.check_init_fn(param_init_fn)
        precision = as_mixed_precision(choices.mp_policy)
        for each in modules:
            checks.refuse_module(each)
        module = whole(modules)
        ignored = checks.ignored_in(module, ignored_params)
        checks.refuse_gradients(module, ignored.ids)
        kind = devices.kind_of(module, device_id, offload)
        unit = UnitArguments(
            choices.sharding_strategy,
            choices.mesh,
            choices.reshard_after_forward,
            precision,
            kind,
            offload,
            choices.dp_mesh_dims,
        )
        policy = unit.policy()
        device = devices.chosen(policy.mesh, device_id)
        devices.refuse_misplaced(module, ignored.ids, device, policy)
        return Arguments(
            modules,
            is_list,
            unit,
            policy,
            ignored,
            device,
            init_from,
            shard_placement_fn,
            auto_wrap_policy,
            param_init_fn,
            ReduceGroup.OWN if separate_reduce_group else ReduceGroup.SHARED,
        )
