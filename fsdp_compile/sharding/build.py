"""The places of a model that hold parameters which are to be sharded.

Makes units out of modules and the places of their parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.modules.classes import gather_on_read
from fsdp_compile.runtime import module_state
from fsdp_compile.runtime.group_state import WrapSource
from fsdp_compile.runtime.module_state import ParamOwner, ParamRef
from fsdp_compile.runtime.replaced_params import ReplacedParameter
from fsdp_compile.runtime.units import READS, FSDPParam, FSDPUnit, UnitPolicy
from fsdp_compile.runtime.unshard_args import refresh_unshard_args
from fsdp_compile.sharding import allocate, devices
from fsdp_compile.sharding.allocate import ParamToShard, PlacementFn


def unmanaged(root: nn.Module, sharded: Iterable[FSDPUnit], ignored: set[int]) -> Iterator[ParamRef]:
    """Every place that holds a parameter which is not sharded yet; places of tied ones that are join their parameter.

    Args:
        root: The module that is about to be sharded.
        sharded: Units of earlier calls in it.
        ignored: `id`s of parameters to leave alone.

    Raises:
        UnsupportedModelError: If a parameter is a DTensor already.
    """
    params = {id(param.parameter): param for unit in sharded for param in unit.params}
    for name, module in root.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in ignored or attribute in module.__dict__.get(READS, {}):
                continue
            param = parameter.param if isinstance(parameter, ReplacedParameter) else params.get(id(parameter))
            if param is not None:
                _join_slot(param, module, attribute)
            elif isinstance(parameter, DTensor):
                raise UnsupportedModelError(
                    f"a parameter is a DTensor already, with placements {parameter.placements}",
                    where=f"{name}.{attribute}" if name else attribute,
                    instead="shard plain parameters, or list it in ignored_params to leave it as it is",
                )
            else:
                yield name, module, attribute, parameter


def each_once(occurrences: Iterable[ParamRef]) -> Iterator[tuple[str, ParamOwner, nn.Parameter]]:
    """Name and first place of each parameter."""
    seen: set[int] = set()
    for name, owner, attribute, parameter in occurrences:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield f"{name}.{attribute}".removeprefix("."), (owner, attribute), parameter


def _join_slot(param: FSDPParam, module: nn.Module, attribute: str) -> None:
    owner, owner_attribute = param.module_refs[0]
    module._parameters[attribute] = param.parameter
    param.module_refs.append((module, attribute))
    read = getattr(owner, READS)[owner_attribute]
    gather_on_read(module, {attribute: read}, param.eval_read(attribute))
    refresh_unshard_args(read[2])


def make_units(
    module: nn.Module,
    roots: dict[nn.Module, UnitPolicy],
    origin: WrapSource,
    occurrences: list[module_state.ParamRef],
    placement: PlacementFn | None,
    device: torch.device | None,
) -> list[FSDPUnit]:
    """Makes the units of one call of `fully_shard`, and fills their parameter groups.

    Args:
        module: What it was called on.
        roots: The modules that units are named after, with their policies.
        origin: Why these.
        occurrences: Where each parameter stands.
        placement: Which dimension of a parameter is split.
        device: Where the shards of parameters without memory go.

    Returns:
        The units that have parameters, in the order of `roots`.
    """
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
        dim = allocate.shard_dim(full_name, parameter, roots[chosen[unit_name]].size, placement)
        local_name = full_name.removeprefix(f"{unit_name}.") if unit_name else full_name
        moves_to = devices.destination(parameter, device)
        members[unit_name][id(parameter)] = ParamToShard(
            local_name, [(owner, attribute)], parameter, dim, device=moves_to
        )
    made = []
    for name, root in chosen.items():
        if members[name]:
            unit = FSDPUnit(root, name, roots[root], origin)
            allocate.allocate_flat_params(unit, list(members[name].values()))
            made.append(unit)
    return made


def _nearest(name: str, chosen: dict[str, nn.Module]) -> str:
    """The innermost chosen module at or above `name`."""
    while name not in chosen:
        name = name.rpartition(".")[0]
    return name


def merged_split(root: nn.Module, parts: list[FSDPUnit]) -> list[FSDPUnit]:
    """Undoes the automatic split of an earlier call, which was one call of a bottom-up series after all.

    Args:
        root: The module of that call.
        parts: Its units.

    Returns:
        One unit, or `parts` if a person chose any of them.
    """
    if len(parts) < 2 or any(part.wrap_source is not WrapSource.SPLIT for part in parts):
        return parts
    first = parts[0]
    unit = FSDPUnit(
        root,
        "",
        first.policy,
        WrapSource.CALL,
        hook=first.hook,
        comm_settings=first.comm_settings,
        reduce_group=first.reduce_group,
    )
    names = {id(m): name for name, m in root.named_modules()}
    members = [
        ParamToShard(
            f"{names[id(part.root)]}.{param.name}".removeprefix("."),
            param.module_refs,
            param.parameter,
            param.spec.dim,
            param.spec.order,
        )
        for part in parts
        for param in part.params
    ]
    allocate.allocate_flat_params(unit, members)
    return [unit]
