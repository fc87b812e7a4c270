"""The arguments of one call of `fully_shard`, read and checked before anything is changed."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.parameter import UninitializedParameter

from fsdp_compile._torch.fully_shard_calls import has_call
from fsdp_compile.comm.mesh import RESHARDS, mesh_of
from fsdp_compile.config.policy import MixedPrecision, as_mixed_precision
from fsdp_compile.errors import ConfigError, UnsupportedModelError

Device = torch.device | str | int
InitFn = Callable[[nn.Module], object]
PlacementFn = Callable[[nn.Parameter], Any]
"""Gives a `Shard`, torch's `ShardPlacementResult`, or `None` for `Shard(0)` over the mesh of the call."""
Reshard = bool | int | Literal["auto"] | None
_OVERRIDES = ("sharding_strategy", "reshard_after_forward", "mesh", "mp_policy")


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """Over which ranks a unit is sharded, and how it computes.

    Attributes:
        reshard_after_forward: FSDP2's argument.
        auto_reshard: Whether the compiler may keep the unit after forward, where FSDP2 reshards.
        own_dtype: If mixed precision excludes the unit: the dtype in which it computes.
        dp_mesh_dims: FSDP2's argument.
    """

    mesh: DeviceMesh
    reshard_after_forward: bool | int | None
    auto_reshard: bool
    precision: MixedPrecision
    own_dtype: torch.dtype | None = None
    dp_mesh_dims: Any = None

    def mesh_dims(self) -> list[int]:
        """The dimensions of the mesh over which the unit's parameters are sharded or replicated, outermost first."""
        names = self.mesh.mesh_dim_names
        if self.dp_mesh_dims is None or names is None:
            return list(range(self.mesh.ndim))
        named = {*self.dp_mesh_dims.replicate_names, *self.dp_mesh_dims.shard_names}
        return [dim for dim, name in enumerate(names) if name in named]

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of these dimensions."""
        return [self.mesh.get_group(dim) for dim in self.mesh_dims()]


@dataclasses.dataclass(frozen=True)
class UnitArguments:
    """The arguments of `fully_shard` that a unit's policy is made of."""

    strategy: ShardingStrategy | None
    mesh: DeviceMesh | None
    reshard_after_forward: Reshard
    precision: MixedPrecision
    device_type: str
    dp_mesh_dims: Any = None

    def policy(self) -> UnitPolicy:
        """The policy of a unit; raises `ConfigError` if arguments contradict each other."""
        reshard = self.reshard_after_forward
        if reshard not in (None, "auto") and not isinstance(reshard, int):
            raise ConfigError(
                f"reshard_after_forward={reshard!r} is not supported",
                where="fully_shard(reshard_after_forward=...)",
                instead='True (gather again in backward), False (keep for backward), "auto" (keep as many units '
                "as fit), a divisor of the shard group or None",
            )
        is_auto = reshard == "auto"
        if self.strategy is not None and reshard is not None:
            raise ConfigError(
                f"{self.strategy} already decides whether parameters are kept after forward, and so does "
                f"reshard_after_forward={reshard!r}",
                where="fully_shard(sharding_strategy=..., reshard_after_forward=...)",
                instead="one of the two",
            )
        if self.dp_mesh_dims is not None and (self.strategy is not None or self.mesh is None):
            raise ConfigError(
                "dp_mesh_dims names dimensions of a mesh to shard and replicate over: it needs a mesh and no strategy",
                where="fully_shard(dp_mesh_dims=...)",
                instead="a mesh with it, and no sharding_strategy",
            )
        mesh = self.mesh
        if self.dp_mesh_dims is None or mesh is None:
            mesh = mesh_of(self.strategy, mesh, device_type=self.device_type)
            _refuse_parts(reshard, mesh.size(mesh.ndim - 1))
        given = True if is_auto else cast("bool | int | None", reshard)
        given = given if self.strategy is None else self.strategy in RESHARDS
        return UnitPolicy(mesh, given, is_auto, self.precision, dp_mesh_dims=self.dp_mesh_dims)

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
        own_names = {"mp_policy": "precision", "sharding_strategy": "strategy"}
        changed = {own_names.get(name, name): value for name, value in overrides.items()}
        if "precision" in changed:
            changed["precision"] = as_mixed_precision(changed["precision"])
        if "strategy" in changed:
            # It takes the place of all that the call says about resharding after forward.
            changed.setdefault("reshard_after_forward", None)
        elif "reshard_after_forward" in changed and self.strategy is not None:
            changed |= {"strategy": None, "mesh": changed.get("mesh", self.policy().mesh)}
        return dataclasses.replace(self, **changed).policy()


def _refuse_parts(reshard: Reshard, size: int) -> None:
    """Raises `ConfigError` for a number of neighbours, to keep parts for backward, that does not divide their group."""
    if isinstance(reshard, int) and not isinstance(reshard, bool) and (reshard < 1 or size % reshard):
        raise ConfigError(
            f"reshard_after_forward={reshard} does not divide the {size} ranks that parameters are sharded over",
            where="fully_shard(reshard_after_forward=...)",
            instead=f"one of {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}, True or False",
        )


@dataclasses.dataclass(frozen=True)
class ShardingSettings:
    """What a call says to the compiler of one unit, and FSDP2 has no place for; kept with its state.

    Attributes:
        is_split: Whether the automatic split made the unit; a later call on a module around its model takes that back.
        cast_inputs_inside: `cast_forward_inputs` of the unit inside of a larger model.
        auto_reshard: `reshard_after_forward="auto"`, for which FSDP2 reshards.
        gather_dtype: What the parameters are sent in, if that is less than FSDP2's 16 or 32 bits.
        keep_low_precision_grads: As in `MixedPrecision`.
        full_precision_in_eval: The same.
        casts_output_in_eval: Whether the unit's output dtype counts in eval mode; not that of what follows a module
            that mixed precision excludes, if that is in full precision then.
        separate_reduce_group: Whether reductions have a process group of their own.
    """

    is_split: bool = False
    cast_inputs_inside: bool = True
    auto_reshard: bool = False
    gather_dtype: torch.dtype | str | None = None
    keep_low_precision_grads: bool = False
    full_precision_in_eval: bool = False
    casts_output_in_eval: bool = True
    separate_reduce_group: bool = False


def roots_of(target: object) -> tuple[nn.Module, ...]:
    """The modules of a call of `fully_shard`: one, or those of a list that are in no other one of it."""
    listed: Sequence[Any] = target if isinstance(target, list | tuple) else (target,)
    if not listed:
        raise ConfigError("the list is empty", where="fully_shard([...])", instead="modules that become one unit")
    for each in listed:
        if not isinstance(each, nn.Module):
            raise ConfigError(
                f"{type(each).__name__} is not a torch.nn.Module",
                where="fully_shard(module)",
                instead="pass the module whose parameters are to be sharded",
            )
    inside = {part for module in listed for part in module.modules() if part is not module}
    return tuple(module for module in dict.fromkeys(listed) if module not in inside)


def ignored_in(roots: Sequence[nn.Module], listed: object) -> frozenset[nn.Parameter]:
    """The parameters that one call ignores; `listed` has parameters, and modules for all parameters in them."""
    if listed is None:
        return frozenset()
    expected = "an iterable of parameters and modules of the model"
    where = "fully_shard(ignored_params=...)"
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise ConfigError(f"ignored_params is {listed!r}", where=where, instead=expected)
    found: set[nn.Parameter] = set()
    for each in listed:
        if isinstance(each, nn.Module):
            if each in roots or any(has_call(part) for part in each.modules()):
                raise ConfigError(
                    "a module to ignore is sharded already, or is the module of the call",
                    where=f"{where}, {type(each).__name__}",
                    instead="ignore modules in it, in the first call of fully_shard() on a module around them",
                )
            found.update(each.parameters())
        elif isinstance(each, nn.Parameter):
            found.add(each)
        else:
            raise ConfigError(f"it contains {each!r}, a {type(each).__name__}", where=where, instead=expected)
    return frozenset(found)


def device_type_of(roots: Sequence[nn.Module], device_id: Device | None, *, is_offloaded: bool) -> str:
    """The device type of a new mesh: of the given device, of the parameters, or of the machine."""
    if isinstance(device_id, str | torch.device):
        return torch.device(device_id).type
    # Parameters that are offloaded are on the host, whatever the mesh communicates on.
    parameter = next((p for root in roots for p in root.parameters()), None)
    if device_id is None and not is_offloaded and parameter is not None and not parameter.is_meta:
        return parameter.device.type
    # A build for CUDA names it as its accelerator on machines without a GPU, too.
    device = torch.accelerator.current_accelerator(check_available=True) if torch.accelerator.is_available() else None
    return "cpu" if device is None else device.type


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where FSDP2 puts what it shards over a mesh: the current device."""
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def check_device(mesh: DeviceMesh, device_id: Device | None) -> None:
    """Raises `ConfigError` for a `device_id` that is not where FSDP2 moves units to."""
    if device_id is None:
        return
    device = device_of(mesh)
    is_index = isinstance(device_id, int) and not isinstance(device_id, bool)
    wanted = torch.device(device.type, cast("int", device_id)) if is_index else torch.device(cast("str", device_id))
    if wanted.type != device.type or (device.type == "cpu" and is_index):
        raise ConfigError(
            f"device {device_id!r} is not one of the mesh, which communicates on {device.type}",
            where="fully_shard(device_id=...)",
            instead=f"a {device.type} device, or another mesh",
        )
    if wanted.index not in (None, device.index) and device.type != "cpu":
        raise ConfigError(
            f"device_id is {wanted}, and this process computes on {device}",
            where="fully_shard(device_id=...)",
            instead=f"torch.{device.type}.set_device({wanted.index}) before: FSDP2 shards on the current device",
        )


def is_whole(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 has no way to split a parameter: 0-d, empty, or of integers."""
    return parameter.dim() == 0 or parameter.numel() == 0 or not parameter.is_floating_point()


def refuse_params(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises an error for a parameter that can be neither sharded nor replicated.

    Raises:
        ConfigError: If it has no shape yet.
        UnsupportedModelError: If it is complex.
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
                instead="a parameter of torch.view_as_real() of it, or list it in ignored_params, then it is neither "
                "sharded nor averaged",
            )
