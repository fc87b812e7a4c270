"""Which parameter goes into which unit: the plan of one call of `fully_shard`, made before any change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compile.comm.mesh import MeshPlacement, with_reshard
from fsdp_compile.comm.spmd_params import SpmdParam
from fsdp_compile.comm.tensor_parallel import TensorParallel
from fsdp_compile.errors import ConfigError
from fsdp_compile.runtime.group_state import UnitPolicy, WrapSource
from fsdp_compile.runtime.module_state import ParamOwner, ParamRef, call_on, is_sharded, reads_of, units
from fsdp_compile.runtime.replaced_params import current
from fsdp_compile.sharding import (
    check_params,
    checks,
    devices,
    gather_extensions,
    initial_values,
    sync_states,
    wrap,
)
from fsdp_compile.sharding.allocate import ParamToShard
from fsdp_compile.sharding.arguments import Arguments, InitFrom
from fsdp_compile.sharding.checks import refuse_scripted
from fsdp_compile.sharding.class_comparisons import refuse_class_comparisons
from fsdp_compile.sharding.mixed_precision import PrecisionPlan, any_full_precision
from fsdp_compile.sharding.shard_placement import Choice, choices, shard_dim


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """One unit that is to be made.

    Attributes:
        root: The module that it is named after.
        name: Fully qualified name of that module.
        params: Its parameters, in registration order.
        number: 1, or another one for each further mesh of the same call's parameters.
    """

    root: nn.Module
    name: str
    policy: UnitPolicy
    params: list[ParamToShard]
    number: int = 1


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
    """What one call of `fully_shard` will do.

    Attributes:
        units: In registration order of their roots; those without parameters are left out.
        roots: Every module that a unit was to be named after, with its policy; not the module of the call.
        wrap_source: Why these.
        below: Modules that earlier calls sharded.
        ignored: `id`s of parameters that this call or an earlier one ignores.
        tied: Parameters that earlier calls sharded, with further places that register them.
        precision: Modules that mixed precision excludes, and buffers that are cast.
        first_rank: For each mesh, what the first rank has values for.
        initial: For each mesh, the values of this rank, where its own count.
        different: Those of `roots` for which a wrap policy has chosen dtypes.
    """

    units: list[UnitPlan]
    roots: dict[nn.Module, UnitPolicy]
    wrap_source: WrapSource
    below: list[nn.Module]
    ignored: set[int]
    tied: list[tuple[nn.Parameter, nn.Module, str]]
    precision: PrecisionPlan
    first_rank: list[sync_states.FirstRankValues]
    initial: list[initial_values.InitialValues]
    different: frozenset[nn.Module]


def plan_units(module: nn.Module, arguments: Arguments) -> ShardingPlan:
    """Plans one call of `fully_shard`. With `sync_module_states` all ranks of the mesh call it together.

    Raises:
        ConfigError: If the wrap policy returns what no unit can have, or a parameter cannot be sharded as asked.
        RankMismatchError: With `sync_module_states`, if ranks have different models.
        UnsupportedModelError: If a parameter that is not ignored is no plain tensor, or shares memory with another.
    """
    below = [m for m in module.modules() if is_sharded(m)]
    # Ignored once, ignored by calls on modules above it, too.
    earlier = {i for m in below if (call := call_on(m)) is not None for i in call.ignored.ids()}
    ignored = arguments.ignored.ids | earlier
    occurrences, tied = _places(module, ignored, arguments.init_from)
    checks.refuse_renormalized(occurrences)
    refuse_class_comparisons(module)
    managed = {parameter for _, _, _, parameter in occurrences}
    check_params.refuse_shared_memory(module, managed)
    roots: dict[nn.Module, UnitPolicy] = {}
    source = WrapSource.CALL
    if arguments.wrap_policy is not None:
        chosen = wrap.policy_units(module, arguments.wrap_policy, managed)
        roots = {root: arguments.unit.overridden(overrides) for root, overrides in chosen.items()}
    elif not below and not arguments.is_list:
        roots = dict.fromkeys(wrap.automatic_units(module, managed), arguments.policy)
        source = WrapSource.SPLIT
    precision = PrecisionPlan()
    different = {root: own for root, own in roots.items() if own.mixed_precision != arguments.unit.precision}
    for root, own in different.items():
        precision.add(root, own.mixed_precision, below)
    precision.add(module, arguments.unit.precision, [*below, *different])
    planned = _units(module, {**roots, module: arguments.policy}, occurrences, arguments, precision)
    by_mesh = _by_mesh(planned, occurrences, arguments.policy.mesh)
    source_of_values, apart = arguments.init_from, [*below, *arguments.ignored.modules]
    first_rank, initial = [], []
    for mesh, held in by_mesh.items():
        # Buffers are of the mesh of the call.
        root = module if mesh == arguments.policy.mesh else nn.Module()
        first_rank.append(sync_states.look(root, held, mesh, source_of_values))
        initial.append(initial_values.take(root, held, mesh, source_of_values, apart))
    return ShardingPlan(
        planned, roots, source, below, ignored, tied, precision, first_rank, initial, frozenset(different)
    )


def _places(
    root: nn.Module, ignored: set[int], source: InitFrom
) -> tuple[list[ParamRef], list[tuple[nn.Parameter, nn.Module, str]]]:
    """Every place of a parameter that is not sharded yet, and further places of those that are."""
    sharded = {id(param.parameter) for unit in units(root) for param in unit.params}
    occurrences: list[ParamRef] = []
    tied: list[tuple[nn.Parameter, nn.Module, str]] = []
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            refuse_scripted(name, module, ignored)
            continue
        for attribute, held in module._parameters.items():
            if held is None or id(held) in ignored or attribute in reads_of(module):
                continue
            parameter = current(held)
            assert isinstance(parameter, nn.Parameter)
            if parameter is not held or id(parameter) in sharded:
                tied.append((parameter, module, attribute))
            else:
                path = f"{name}.{attribute}".removeprefix(".")
                if source is not InitFrom.SHARDS:
                    check_params.refuse_class(path, parameter)
                occurrences.append((name, module, attribute, parameter))
    return occurrences, tied


def each_once(occurrences: Iterable[ParamRef]) -> Iterator[tuple[str, ParamOwner, nn.Parameter]]:
    """Name and first place of each parameter."""
    seen: set[int] = set()
    for name, owner, attribute, parameter in occurrences:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield f"{name}.{attribute}".removeprefix("."), (owner, attribute), parameter


Occurrence = tuple[str, ParamOwner, nn.Parameter]
"""Name, first place and value of a parameter."""


def _by_mesh(
    planned: Iterable[UnitPlan], occurrences: Iterable[ParamRef], first: DeviceMesh
) -> dict[DeviceMesh, list[Occurrence]]:
    """The parameters of each mesh, that of the call first."""
    meshes = {id(member.parameter): unit.policy.mesh for unit in planned for member in unit.params}
    found: dict[DeviceMesh, list[Occurrence]] = {first: []}
    for held in each_once(occurrences):
        found.setdefault(meshes[id(held[2])], []).append(held)
    return found


def _units(
    module: nn.Module,
    roots: dict[nn.Module, UnitPolicy],
    occurrences: list[ParamRef],
    arguments: Arguments,
    precision: PrecisionPlan,
) -> list[UnitPlan]:
    """Assigns every parameter to the innermost root at or above its first place, in one unit for each of its meshes."""
    names = {id(m): name for name, m in module.named_modules()}
    chosen = {names[id(m)]: m for m in roots}
    members: dict[str, dict[UnitPolicy, dict[int, ParamToShard]]] = {name: {} for name in chosen}
    placed: dict[int, ParamToShard] = {}
    asked = choices(((name, p) for name, _, p in each_once(occurrences)), arguments.placement)
    for module_name, owner, attribute, parameter in occurrences:
        if id(parameter) in placed:
            placed[id(parameter)].module_refs.append((owner, attribute))
            continue
        unit_name = _nearest(module_name, chosen)
        full_name = f"{module_name}.{attribute}" if module_name else attribute
        choice = asked.get(id(parameter), Choice())
        policy = _on_ranks(roots[chosen[unit_name]], choice.ranks, full_name, arguments)
        split = _split(full_name, parameter, policy, arguments.init_from)
        shape = None if split is None else split.local_shape
        dim = shard_dim(full_name, parameter, policy.size, choice.placement, shape)
        gather_extensions.refuse(full_name, parameter, dim, policy, arguments.init_from)
        local_name = full_name.removeprefix(f"{unit_name}.") if unit_name else full_name
        placed[id(parameter)] = ParamToShard(
            local_name,
            [(owner, attribute)],
            parameter,
            dim,
            device=devices.destination(parameter, arguments.device),
            tensor_parallel=split,
        )
        members[unit_name].setdefault(policy, {})[id(parameter)] = placed[id(parameter)]
    for member in placed.values():
        member.keeps_own_dtype = any_full_precision((m for m, _ in member.module_refs), precision)
    return [
        UnitPlan(root, name, policy, list(params.values()), number)
        for name, root in chosen.items()
        for number, (policy, params) in enumerate(members[name].items(), start=1)
    ]


def _on_ranks(policy: UnitPolicy, ranks: MeshPlacement | None, name: str, arguments: Arguments) -> UnitPolicy:
    """The policy of a unit for those of its parameters that are sharded over other ranks."""
    if ranks is None:
        return policy
    if ranks.mesh.device_type != policy.mesh.device_type:
        raise ConfigError(
            f"it returned a mesh of {ranks.mesh.device_type}, and that of the call is of {policy.mesh.device_type}",
            where=f"shard_placement_fn, parameter {name}",
            instead="meshes of one device type",
        )
    # A number of ranks is one for each mesh, also where it is all ranks of the first.
    given, is_of_call = arguments.unit.reshard_after_forward, policy == arguments.policy
    reshard = given if is_of_call and given is not None else policy.mesh_placement.reshard_after_forward
    return dataclasses.replace(policy, mesh_placement=with_reshard(ranks, reshard_after_forward=reshard))


def _split(name: str, parameter: nn.Parameter, policy: UnitPolicy, source: InitFrom) -> TensorParallel | None:
    spmd = policy.mesh_placement.spmd
    if spmd is not None:
        if isinstance(parameter, DTensor):
            check_params.refuse_references(name, parameter)
        return SpmdParam.over(name, parameter, spmd)
    if not isinstance(parameter, DTensor):
        return None
    if source is InitFrom.SHARDS:
        return TensorParallel.of_sharded(parameter, policy.mesh)
    check_params.refuse_references(name, parameter)
    return TensorParallel.of(name, parameter, policy.mesh)


def _nearest(name: str, chosen: dict[str, nn.Module]) -> str:
    """The innermost chosen module at or above `name`."""
    while name not in chosen:
        name = name.rpartition(".")[0]
    return name
