"""Parameters that are no longer views of their flat shard: noticed before a step, and put back.

`.to()`, `load_state_dict(assign=True)`, `module.weight = nn.Parameter(...)` and `requires_grad_()` all change what a
module holds. The next step would read the old values, and updates would go to memory that nobody gathers. So every
step begins with a look at the identities of all parameters; where one has changed, its values are copied into place.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fsdp_compile import _torch
from fsdp_compile.errors import ConfigError
from fsdp_compile.parameters import storage
from fsdp_compile.parameters.flat import FlatShard, ParameterSlot
from fsdp_compile.parameters.unit import Holding, Unit


def check(unit: Unit) -> None:
    """Makes every parameter of `unit` a view again, and refuses those that have no value.

    Raises:
        ConfigError: As `put_in_place`, or if a parameter is on the meta device.
    """
    put_in_place(unit)
    for flat in unit.flats:
        if flat.leaf.device.type == "meta":
            raise ConfigError(
                "a parameter is on the meta device and has no value yet",
                where=unit.parameter_name(flat.slots[0]),
                instead="fsdp_compile.materialize(model), which initializes it, or model.to_empty(device=...) and a "
                "checkpoint, before the first step",
            )


def put_in_place(unit: Unit) -> None:
    """Makes every parameter of `unit` a view again, with the values that its module holds now.

    New dtypes, devices, shapes and trainability give the unit new flat shards.

    Raises:
        ConfigError: If a parameter is gone, is of another mesh, or its `.data` was assigned to; or if `full_params`
            holds some parameters of the model in full, and not all.
    """
    refuse_held(unit)
    if any(flat.is_broken() for flat in unit.flats):
        repaired = [repair_in_place(flat) for flat in unit.flats]
        if not all(repaired):
            storage.fill(unit, members(unit))


def check_inside_graph(flat: FlatShard) -> None:
    """The same for a compiled region whose inputs are chosen already: what does not fit in place is refused.

    Raises:
        ConfigError: If a parameter changed its dtype, device, shape or trainability since the region was entered.
    """
    refuse_held(flat.unit)
    if not flat.is_broken():
        return
    if not repair_in_place(flat):
        changed = next(s for s in flat.slots if not _fits(_held(flat.unit, s) or s.parameter, s, flat.leaf))
        raise ConfigError(
            "a parameter changed its dtype, device, shape or requires_grad, and the compiled function cannot notice "
            "that in time",
            where=flat.unit.parameter_name(changed),
            instead="compile the module itself (torch.compile(model, backend='fsdp')), or make the change before "
            "the first compiled call",
        )


def refuse_held(unit: Unit) -> None:
    """Refuses to run a model of which `full_params` holds only a part in full.

    Raises:
        ConfigError: If modules of `unit` hold full parameters.
    """
    if unit.holding is Holding.FULL:
        raise ConfigError(
            "a forward reads sharded parameters of a model that is partly held in full",
            where=f"inside full_params(), unit {unit.title}",
            instead="full_params(model) of the whole model that is called, or leave the context before the call",
        )


def repair_in_place(flat: FlatShard) -> bool:
    """Copies changed parameters into their slots if they fit there as they are.

    Returns:
        Whether all of them fit.
    """
    found = [(slot, _held(flat.unit, slot)) for slot in flat.slots]
    if any(held is None or not _fits(held, slot, flat.leaf) for slot, held in found):
        return False
    with torch.no_grad():
        for slot, held in found:
            if held is not None and (held is not slot.parameter or _local(held) is not slot.local):
                storage.adopt(slot, held, flat.unit.policy)
    storage.follow_updaters(flat.unit)
    return True


def _held(unit: Unit, slot: ParameterSlot) -> nn.Parameter | None:
    """What all owners of a slot hold now; `None` if they hold different things."""
    held = [module._parameters.get(attribute) for module, attribute in slot.owners]
    if any(parameter is None for parameter in held):
        raise ConfigError(
            "a sharded parameter was removed from its module",
            where=unit.parameter_name(slot),
            instead="remove it before fully_shard() or the first compiled call",
        )
    if held[0] is slot.parameter and _local(held[0]) is slot.local and held[0].untyped_storage() is not slot.shell:
        raise ConfigError(
            "`.data` of a sharded parameter was assigned to, which its DTensor does not notice: the value is lost",
            where=unit.parameter_name(slot),
            instead="assign a new nn.Parameter to the module's attribute, or parameter.copy_(value) under no_grad()",
        )
    return held[0] if all(parameter is held[0] for parameter in held) else None


def _fits(held: nn.Parameter, slot: ParameterSlot, leaf: nn.Parameter) -> bool:
    local = _local(held)
    return (
        tuple(held.shape) == slot.spec.shape
        and local.dtype == leaf.dtype
        and local.device == leaf.device
        and held.requires_grad == leaf.requires_grad
    )


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return _torch.local_tensor(parameter) if isinstance(parameter, DTensor) else parameter


def members(unit: Unit) -> list[storage.Member]:
    """What the modules of a unit hold now; parameters that were tied and no longer are become members of their own."""
    found: dict[int, storage.Member] = {}
    for slot in unit.slots:
        for module, attribute in slot.owners:
            parameter = module._parameters[attribute]
            assert parameter is not None
            known = found.get(id(parameter))
            if known is not None:
                known.owners.append((module, attribute))
                continue
            name = slot.name if (module, attribute) == slot.owners[0] else f"{slot.name} ({attribute})"
            order = slot.spec.order if isinstance(parameter, DTensor) and parameter is slot.parameter else ()
            dim = _dim(unit, slot, parameter)
            found[id(parameter)] = storage.Member(name, [(module, attribute)], parameter, dim, order)
    return list(found.values())


def _dim(unit: Unit, slot: ParameterSlot, parameter: nn.Parameter) -> int | None:
    """The slot's dimension, or the default one if the parameter that took its place has other dimensions."""
    if parameter.dim() == len(slot.spec.shape) and slot.spec.dim is not None:
        chosen = Shard(slot.spec.dim)
        return storage.shard_dim(unit.parameter_name(slot), parameter, unit.policy.size, lambda _: chosen)
    return storage.shard_dim(unit.parameter_name(slot), parameter, unit.policy.size, None)
