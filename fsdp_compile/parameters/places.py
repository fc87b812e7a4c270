"""The places of a model that hold parameters which are to be sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.parameters.flat import ParameterSlot
from fsdp_compile.parameters.moved import MovedParameter
from fsdp_compile.parameters.reads import READS, gather_on_read
from fsdp_compile.parameters.unit import Unit
from fsdp_compile.parameters.variants import publish

Place = tuple[nn.Module, str]
"""The first module that holds a parameter, and the attribute."""
Occurrence = tuple[str, nn.Module, str, nn.Parameter]
"""Name of the module, the module, the attribute, the parameter."""


def unmanaged(root: nn.Module, sharded: Iterable[Unit], ignored: set[int]) -> Iterator[Occurrence]:
    """Every place that holds a parameter which is not sharded yet; places of tied ones that are join their slot.

    Args:
        root: The module that is about to be sharded.
        sharded: Units of earlier calls in it.
        ignored: `id`s of parameters to leave alone.

    Raises:
        UnsupportedModelError: If a parameter is a DTensor already.
    """
    slots = {id(slot.parameter): slot for unit in sharded for slot in unit.slots}
    for name, module in root.named_modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in ignored or attribute in module.__dict__.get(READS, {}):
                continue
            slot = parameter.slot if isinstance(parameter, MovedParameter) else slots.get(id(parameter))
            if slot is not None:
                _join_slot(slot, module, attribute)
            elif isinstance(parameter, DTensor):
                raise UnsupportedModelError(
                    f"a parameter is a DTensor already, with placements {parameter.placements}",
                    where=f"{name}.{attribute}" if name else attribute,
                    instead="shard plain parameters, or list it in ignored_params to leave it as it is",
                )
            else:
                yield name, module, attribute, parameter


def each_once(occurrences: Iterable[Occurrence]) -> Iterator[tuple[str, Place, nn.Parameter]]:
    """Name and first place of each parameter."""
    seen: set[int] = set()
    for name, owner, attribute, parameter in occurrences:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield f"{name}.{attribute}".removeprefix("."), (owner, attribute), parameter


def _join_slot(slot: ParameterSlot, module: nn.Module, attribute: str) -> None:
    owner, owner_attribute = slot.owners[0]
    module._parameters[attribute] = slot.parameter
    slot.owners.append((module, attribute))
    read = getattr(owner, READS)[owner_attribute]
    gather_on_read(module, {attribute: read}, slot.eval_read(attribute))
    publish(read[2])
