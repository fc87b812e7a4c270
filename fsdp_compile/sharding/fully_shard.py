"""`fully_shard`: reads FSDP1's and its own arguments, chooses units, and calls torch's `fully_shard` for each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, ShardingStrategy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch import fully_shard_calls as private
from fsdp_compile.comm import alike
from fsdp_compile.comm.failures import tell_of_uncaught_errors
from fsdp_compile.config.policy import AnyOffloadPolicy, AnyPrecisionPolicy, WrapPolicy, as_mixed_precision, as_offload
from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.buffers import cast_buffers, in_own_dtype
from fsdp_compile.fsdp2.take_over import keep_inputs_in_eval
from fsdp_compile.sharding.arguments import (
    Device,
    InitFn,
    PlacementFn,
    ShardingSettings,
    UnitArguments,
    UnitPolicy,
    check_device,
    device_of,
    device_type_of,
    ignored_in,
    is_whole,
    refuse_params,
    roots_of,
)
from fsdp_compile.sharding.materialize import materialize
from fsdp_compile.sharding.replicated import Home, Place, ReplicatedParams
from fsdp_compile.sharding.units import (
    Unit,
    automatic_units,
    open_modules,
    plan_units,
    policy_units,
    torch_precision,
    with_excluded,
)

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])

tell_of_uncaught_errors()  # also of those that come before anything is sharded


def fully_shard(  # noqa: PLR0913  FSDP's arguments
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: AnyPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    offload_policy: AnyOffloadPolicy = OffloadPolicy(),  # noqa: B008  frozen
    ignored_params: Iterable[nn.Parameter | nn.Module] | None = None,
    auto_wrap_policy: WrapPolicy | None = None,
    param_init_fn: InitFn | None = None,
    sharding_strategy: ShardingStrategy | None = None,
    sync_module_states: bool = False,
    device_id: Device | None = None,
    separate_reduce_group: bool = False,
    dp_mesh_dims: Any = None,
) -> M:
    """Shards the parameters of `module` over the ranks of `mesh`, in place, by calls of torch's `fully_shard`.

    Called on a whole model, it splits it into units: repeated blocks, then embedding and head, then the rest. Called
    bottom-up, as with FSDP2, each call makes one unit of what the calls below it left.

    Parameters that FSDP2 cannot split (0-d, empty or integer) stay whole on every rank, and their gradients are
    averaged at the end of the backward. Units that share a parameter become one.

    Args:
        module: The module. A list of modules becomes one unit, as with FSDP2.
        mesh: 1-D to shard over, 2-D (replicate, shard) for hybrid sharding. By default the whole world, which is
            started from torchrun's environment if need be; strategies with replicas name its dimensions "dp_replicate"
            and "fsdp".
        reshard_after_forward: As FSDP2's. "auto" lets the compiler keep as many units as fit into the planned memory;
            uncompiled it is True.
        shard_placement_fn: As FSDP2's.
        mp_policy: Dtypes of gathered parameters, reduction, inputs and outputs: FSDP2's `MixedPrecisionPolicy`, FSDP1's
            `MixedPrecision`, or ours, which has more options.
        offload_policy: FSDP2's policies, or FSDP1's `CPUOffload`.
        ignored_params: Parameters that are neither sharded nor reduced. A module stands for all parameters in it.
        auto_wrap_policy: One of FSDP1's wrap policies, to choose the units instead of the automatic split. A
            `CustomPolicy` may return a dict for a module: `sharding_strategy`, `reshard_after_forward`, `mesh` or
            `mp_policy` of that unit.
        param_init_fn: Initializes what is on the meta device in `module`, as `materialize` does. Without it, that
            stays on meta.
        sharding_strategy: FSDP1's name for a mesh and `reshard_after_forward`, instead of the latter. Hybrid sharding
            without a mesh shards over the ranks of each machine.
        sync_module_states: Gives all ranks the values of the first rank of the mesh, unit by unit. Other ranks may have
            them on meta. What the first rank has on meta, too, is left to `param_init_fn`.
        device_id: Where the model goes, unit by unit: the current device of the mesh's type, or its index.
        separate_reduce_group: As FSDP2's `set_separate_reduce_scatter_group()`.
        dp_mesh_dims: FSDP2's `DataParallelMeshDims`.

    Returns:
        `module` itself.

    Raises:
        ConfigError: If arguments contradict each other or are not supported.
        RankMismatchError: With `sync_module_states`, if ranks have different models.
        UnsupportedModelError: If a parameter that is not ignored is complex.
        Exception: Torch's own errors, such as for a parameter that is not contiguous.
    """
    roots = roots_of(module)
    if any(map(private.has_call, roots)):
        torch_fully_shard(list(roots))  # raises
    offload = as_offload(offload_policy)
    device_type = device_type_of(roots, device_id, is_offloaded=type(offload) is not OffloadPolicy)
    precision = as_mixed_precision(mp_policy)
    unit = UnitArguments(sharding_strategy, mesh, reshard_after_forward, precision, device_type, dp_mesh_dims)
    is_list = not isinstance(module, nn.Module)
    for name, value in (("sync_module_states", sync_module_states), ("separate_reduce_group", separate_reduce_group)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}", where=f"fully_shard({name}=...)", instead="True or False")
    if is_list and auto_wrap_policy is not None:
        raise ConfigError(
            "a list of modules becomes one unit, and a wrap policy would choose others",
            where="fully_shard([...], auto_wrap_policy=...)",
            instead="one of the two",
        )
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(
            f"param_init_fn is a {type(param_init_fn).__name__}, which cannot be called",
            where="fully_shard(param_init_fn=...)",
            instead="a function of one module that initializes the module's own parameters and buffers",
        )
    ignored = ignored_in(roots, ignored_params)
    policy = unit.policy()
    check_device(policy.mesh, device_id)
    _Call(
        roots,
        is_list,
        unit,
        policy,
        ignored,
        offload,
        shard_placement_fn,
        auto_wrap_policy,
        param_init_fn,
        sync_module_states,
        separate_reduce_group,
    ).run()
    return module


fully_shard.state = torch_fully_shard.state  # type: ignore[attr-defined]  # as FSDP2's function has it


@dataclasses.dataclass
class _Call:
    """One call of `fully_shard`, whose arguments are checked, planned before any change.

    Attributes:
        modules: The modules of the call, none in another one of them.
        is_list: Whether the call is on a list of modules, which become one unit.
        policy: Of a unit without overrides.
        ignored: Parameters that stay as they are.
    """

    modules: tuple[nn.Module, ...]
    is_list: bool
    unit: UnitArguments
    policy: UnitPolicy
    ignored: frozenset[nn.Parameter]
    offload: OffloadPolicy
    placement: PlacementFn | None
    wrap_policy: Any
    init_fn: InitFn | None
    sync_module_states: bool
    separate_reduce_group: bool

    def __post_init__(self) -> None:
        roots = self.modules
        self._whole = roots[0] if len(roots) == 1 else nn.ModuleList(roots)
        self._below = [part for part in self._whole.modules() if private.has_call(part)]
        own = {p for module in open_modules(roots) for p in module.parameters(recurse=False)} - self.ignored
        named = {p: name for name, p in self._whole.named_parameters() if p in own}
        refuse_params((name, p) for p, name in named.items())
        self._replicated = {p for p in named if is_whole(p)}
        self._managed = {p: name for p, name in named.items() if p not in self._replicated}
        fn = self.placement
        self._placements = {} if fn is None else {p: fn(p) for p in self._managed}
        self._is_split = self.wrap_policy is None and not self._below and not self.is_list
        self._policy, chosen = with_excluded(roots, self.policy, self._chosen())
        self._units = plan_units(roots, self._policy, chosen, self._managed)
        self._later = {unit: self._later_dtypes(unit) for unit in self._units}

    def _chosen(self) -> dict[nn.Module, UnitPolicy]:
        if self.wrap_policy is not None:
            chosen = policy_units(self._whole, self.wrap_policy, self._managed)
            return {m: self.unit.overridden(changes) for m, changes in chosen.items()}
        return dict.fromkeys(automatic_units(self._whole, self._managed) if self._is_split else (), self.policy)

    def _later_dtypes(self, unit: Unit) -> list[list[nn.Parameter]]:
        """The trainable parameters of a unit of each dtype after the first: a group of FSDP2's has one."""
        trained = [p for p in unit.params() if p in self._managed and p.requires_grad]
        dtypes = list(dict.fromkeys(p.dtype for p in trained))[1:]
        if dtypes and not fsdp2.has_group_lists():
            late = next(p for p in trained if p.dtype == dtypes[0])
            raise ConfigError(
                f"it is of {late.dtype}, and {self._managed[trained[0]]} of {trained[0].dtype}: this torch needs one "
                "dtype in all trainable parameters of a unit",
                where=self._managed[late],
                instead="torch 2.12 or newer, one dtype, or units of one dtype each: auto_wrap_policy, or more calls",
            )
        return [[p for p in trained if p.dtype == dtype] for dtype in dtypes]

    def run(self) -> None:
        """Shards the units, and gives parameters and buffers the values that the call asks for."""
        with in_own_dtype(self._whole):
            self._shard_units()
            if self.init_fn is not None:
                materialize(self._whole, self.init_fn)
        for unit in self._units:
            precision = unit.policy.precision
            if precision.buffer_dtype is not None and unit.policy.own_dtype is None:
                cast_buffers(unit.own, precision.buffer_dtype, in_eval=precision.full_precision_in_eval)

    def _shard_units(self) -> None:
        inner = {buffer for module in self._below for buffer in module.buffers()}
        values = _FirstRank(self._named_values(inner), self._policy) if self.sync_module_states else None
        _merge_splits(self._below)
        places = self._replicated_places()
        for unit in self._units:
            if values is not None:
                values.send(unit.tensors(), unit.policy)
            self._shard(unit)
        if values is not None:
            values.send(inner, self._policy)
        for module in self._below:
            if (settings := private.kept_with(module, "settings")) is not None:
                private.cast_inputs(module, casts=settings.cast_inputs_inside)
        self._replicate(places)
        for root in self.modules if self.separate_reduce_group else ():
            # One group for the whole model. It is newer than torch 2.11.
            if isinstance(root, FSDPModule) and hasattr(root, "set_separate_reduce_scatter_group"):
                root.set_separate_reduce_scatter_group()

    def _named_values(self, inner: set[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What no call has sharded or ignores, and buffers of inner calls, by name, each once."""
        own = {tensor for unit in self._units for tensor in unit.tensors()}.union(inner) - self.ignored
        named = itertools.chain(self._whole.named_parameters(), self._whole.named_buffers())
        return {name: tensor for name, tensor in named if tensor in own}

    def _replicated_places(self) -> dict[Place, Home]:
        fn = self.placement
        # One that chooses no mesh may expect parameters that have dimensions.
        chooses = fn is not None and any(map(private.chosen_mesh, self._placements.values()))

        def home(unit: Unit, parameter: nn.Parameter) -> Home:
            policy = unit.policy
            if chooses and fn is not None and (own := private.chosen_mesh(fn(parameter))) is not None:
                policy = dataclasses.replace(policy, mesh=own[0], dp_mesh_dims=own[1])
            return Home(unit.modules[0], policy)

        return {
            (module, name): home(unit, parameter)
            for unit in self._units
            for module in unit.own
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter in self._replicated
        }

    def _shard(self, unit: Unit) -> None:
        policy = unit.policy
        later = self._later.pop(unit)
        ignored = {p for p in unit.params() if p not in self._managed}.union(*later)
        placed = {p: self._placements.pop(p) for p in unit.params() if p in self._placements}
        for parameter in unit.params():  # or all of the model would be in memory until the end
            self._managed.pop(parameter, None)
        arguments: dict[str, Any] = {
            "mesh": policy.mesh,
            "reshard_after_forward": policy.reshard_after_forward,
            "shard_placement_fn": placed.__getitem__ if placed else None,
            "mp_policy": torch_precision(unit, self._policy, is_split=self._is_split),
            "offload_policy": self.offload,
        }
        if policy.dp_mesh_dims is not None:  # newer than torch 2.11
            arguments["dp_mesh_dims"] = policy.dp_mesh_dims
        for module in unit.modules:
            private.derive_class(module)
        target: Any = unit.modules if len(unit.modules) > 1 else unit.modules[0]
        torch_fully_shard(target, ignored_params=ignored or None, **arguments)
        for params in later:
            private.add_group(unit.modules, params, **{"dp_mesh_dims": None, **arguments})
        by_policy = not self._is_split
        precision, is_whole_unit = policy.precision, policy.own_dtype is not None
        settings = ShardingSettings(
            is_split=self._is_split and not unit.is_call and not is_whole_unit,
            cast_inputs_inside=is_whole_unit or (precision.cast_forward_inputs and (unit.is_call or by_policy)),
            auto_reshard=policy.auto_reshard,
            gather_dtype=None if is_whole_unit else precision.gather_dtype,
            keep_low_precision_grads=precision.keep_low_precision_grads and not is_whole_unit,
            full_precision_in_eval=precision.full_precision_in_eval,
            casts_output_in_eval=not (is_whole_unit and precision.full_precision_in_eval),
            separate_reduce_group=self.separate_reduce_group,
        )
        private.keep_with(unit.modules[0], "settings", settings)
        if settings.full_precision_in_eval:
            keep_inputs_in_eval(unit.modules[0])

    def _replicate(self, places: dict[Place, Home]) -> None:
        for (module, name), home in places.items():
            parameter = module._parameters[name]
            assert parameter is not None
            if not parameter.is_meta:
                parameter.data = parameter.detach().to(device_of(home.policy.mesh))
        inner = {part: its for part in self._below if (its := private.kept_with(part, "replicated")) is not None}
        if not places and not inner:
            return
        root = self.modules[0]
        own = ReplicatedParams(root, places)
        for part, its in inner.items():
            own.absorb(its)
            private.keep_with(part, "replicated", None)
        private.keep_with(root, "replicated", own)


class _FirstRank:
    """What the first rank of the mesh has values for (`sync_module_states`); all ranks make it together.

    Raises:
        RankMismatchError: On all ranks, if they have different models.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], policy: UnitPolicy) -> None:
        groups, device = policy.groups(), device_of(policy.mesh)
        alike.require(
            {name: f"{t.dtype} {tuple(t.shape)}" for name, t in tensors.items()},
            groups,
            device,
            what="models",
            where="fully_shard(sync_module_states=True)",
            instead="the same model on every rank; ranks other than the first may have it on meta",
        )
        valued = alike.of_first([name for name, tensor in tensors.items() if not tensor.is_meta], groups, device)
        self._tensors = [tensors[name] for name in valued]

    @torch.no_grad()
    def send(self, wanted: Container[torch.Tensor], policy: UnitPolicy) -> None:
        """Gives some tensors the first rank's values on all ranks of a mesh, and memory where they have none."""
        device = device_of(policy.mesh)
        sent = [tensor for tensor in self._tensors if tensor in wanted]
        self._tensors = [tensor for tensor in self._tensors if tensor not in wanted]  # their memory ends with sharding
        for tensor in sent:
            if tensor.is_meta:
                value: torch.Tensor = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                torch.utils.swap_tensors(tensor, value)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            value = local.detach().to(device).contiguous()
            for group in policy.groups():
                dist.broadcast(value, group=group, group_src=0)
            if value.data_ptr() != local.data_ptr():
                local.detach().copy_(value)
            torch.autograd.graph.increment_version(local)  # collectives do not


def _merge_splits(below: list[nn.Module]) -> None:
    """Makes one unit of each earlier call that split its module: it was the first of a bottom-up series."""
    for module in reversed(below):  # inner ones first
        settings = private.kept_with(module, "settings")
        if settings is None or settings.is_split:
            continue
        parts = [p for p in module.modules() if (s := private.kept_with(p, "settings")) is not None and s.is_split]
        if parts:
            private.merge_calls(module, parts)
            if (replicated := private.kept_with(module, "replicated")) is not None:
                replicated.move(parts, module)
            below[:] = [part for part in below if private.has_call(part)]
