"""Which parameter goes into which unit: the plan of one call of `fully_shard`, made before any change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.comm.tensor_parallel import TensorParallel
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
from fsdp_compile.sharding.shard_dim import shard_dim


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """One unit that is to be made.

    Attributes:
        root: The module that it is named after.
        name: Fully qualified name of that module.
        params: Its parameters, in registration order.
    """

    root: nn.Module
    name: str
    policy: UnitPolicy
    params: list[ParamToShard]


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
        first_rank: What the first rank has values for.
        initial: The values of this rank, where its own count.
        different: Those of `roots` for which a wrap policy has chosen dtypes.
    """

    units: list[UnitPlan]
    roots: dict[nn.Module, UnitPolicy]
    wrap_source: WrapSource
    below: list[nn.Module]
    ignored: set[int]
    tied: list[tuple[nn.Parameter, nn.Module, str]]
    precision: PrecisionPlan
    first_rank: sync_states.FirstRankValues
    initial: initial_values.InitialValues
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
    earlier = {i for m in below if (call := call_on(m)) is not None for i in call.ignored}
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
    mesh, source_of_values = arguments.policy.mesh, arguments.init_from
    first_rank = sync_states.look(module, each_once(occurrences), mesh, source_of_values)
    initial = initial_values.take(
        module, each_once(occurrences), mesh, source_of_values, [*below, *arguments.ignored.modules]
    )
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


def _units(
    module: nn.Module,
    roots: dict[nn.Module, UnitPolicy],
    occurrences: list[ParamRef],
    arguments: Arguments,
    precision: PrecisionPlan,
) -> list[UnitPlan]:
    """Assigns every parameter to the innermost root at or above its first place."""
    names = {id(m): name for name, m in module.named_modules()}
    chosen = {names[id(m)]: m for m in roots}
    members: dict[str, dict[int, ParamToShard]] = {name: {} for name in chosen}
    unit_of: dict[int, str] = {}
    for module_name, owner, attribute, parameter in occurrences:
        unit_name = unit_of.setdefault(id(parameter), _nearest(module_name, chosen))
        if id(parameter) in members[unit_name]:
            members[unit_name][id(parameter)].module_refs.append((owner, attribute))
            continue
        full_name = f"{module_name}.{attribute}" if module_name else attribute
        policy = roots[chosen[unit_name]]
        split = _split(full_name, parameter, policy, arguments.init_from)
        shape = None if split is None else split.local_shape
        dim = shard_dim(full_name, parameter, policy.size, arguments.placement, shape)
        gather_extensions.refuse(full_name, parameter, dim, policy, arguments.init_from)
        local_name = full_name.removeprefix(f"{unit_name}.") if unit_name else full_name
        members[unit_name][id(parameter)] = ParamToShard(
            local_name,
            [(owner, attribute)],
            parameter,
            dim,
            device=devices.destination(parameter, arguments.device),
            tensor_parallel=split,
        )
    for member in (member for unit in members.values() for member in unit.values()):
        member.keeps_own_dtype = any_full_precision((m for m, _ in member.module_refs), precision)
    return [
        UnitPlan(root, name, roots[root], list(members[name].values()))
        for name, root in chosen.items()
        if members[name]
    ]


def _split(name: str, parameter: nn.Parameter, policy: UnitPolicy, source: InitFrom) -> TensorParallel | None:
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
