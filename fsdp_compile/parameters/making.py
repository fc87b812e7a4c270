"""Makes units out of modules and the places of their parameters."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_compile.parameters import devices, places, storage
from fsdp_compile.parameters.storage import Member, PlacementFn
from fsdp_compile.parameters.unit import Origin, Unit, UnitPolicy


def make_units(
    module: nn.Module,
    roots: dict[nn.Module, UnitPolicy],
    origin: Origin,
    occurrences: list[places.Occurrence],
    placement: PlacementFn | None,
    device: torch.device | None,
) -> list[Unit]:
    """Makes the units of one call of `fully_shard`, and fills their flat shards.

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
    members: dict[str, dict[int, Member]] = {name: {} for name in chosen}
    unit_of: dict[int, str] = {}
    for module_name, owner, attribute, parameter in occurrences:
        unit_name = unit_of.setdefault(id(parameter), _nearest(module_name, chosen))
        if id(parameter) in members[unit_name]:
            members[unit_name][id(parameter)].owners.append((owner, attribute))
            continue
        full_name = f"{module_name}.{attribute}" if module_name else attribute
        dim = storage.shard_dim(full_name, parameter, roots[chosen[unit_name]].size, placement)
        local_name = full_name.removeprefix(f"{unit_name}.") if unit_name else full_name
        moves_to = devices.destination(parameter, device)
        members[unit_name][id(parameter)] = Member(local_name, [(owner, attribute)], parameter, dim, device=moves_to)
    made = []
    for name, root in chosen.items():
        if members[name]:
            unit = Unit(root, name, roots[root], origin)
            storage.fill(unit, list(members[name].values()))
            made.append(unit)
    return made


def _nearest(name: str, chosen: dict[str, nn.Module]) -> str:
    """The innermost chosen module at or above `name`."""
    while name not in chosen:
        name = name.rpartition(".")[0]
    return name


def merged_split(root: nn.Module, parts: list[Unit]) -> list[Unit]:
    """Undoes the automatic split of an earlier call, which was one call of a bottom-up series after all.

    Args:
        root: The module of that call.
        parts: Its units.

    Returns:
        One unit, or `parts` if a person chose any of them.
    """
    if len(parts) < 2 or any(part.origin is not Origin.SPLIT for part in parts):
        return parts
    first = parts[0]
    unit = Unit(
        root,
        "",
        first.policy,
        Origin.CALL,
        hook=first.hook,
        accumulation=first.accumulation,
        reduce_queue=first.reduce_queue,
    )
    names = {id(m): name for name, m in root.named_modules()}
    members = [
        Member(
            f"{names[id(part.root)]}.{slot.name}".removeprefix("."),
            slot.owners,
            slot.parameter,
            slot.spec.dim,
            slot.spec.order,
        )
        for part in parts
        for slot in part.slots
    ]
    storage.fill(unit, members)
    return [unit]
