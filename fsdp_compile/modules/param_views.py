"""What `state_dict()` gives for a sharded parameter.

Torch saves and copies a DTensor only if its local tensor begins where its storage begins, and it writes storages
whole. A parameter lies somewhere in its parameter group. So a state dict holds the same memory under a storage of its
own.

Modules that hold plain, full parameters for a while, in place of the sharded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch.tensors import local_tensor, make_dtensor
from fsdp_compile.runtime.units import READS, FSDPParam, FSDPParamGroup


def give_storages(
    module: nn.Module, destination: dict[str, Any], prefix: str, flats: Iterable[tuple[str, FSDPParamGroup]]
) -> None:
    """Replaces sharded parameters in a state dict by DTensors that can be saved and copied, and share their memory.

    Args:
        module: The module that was just saved.
        destination: The state dict.
        prefix: Before each name of the module in it.
        flats: Names of sharded parameters of the module, each with the parameter group that it lies in.
    """
    for name, flat in flats:
        slot = next((s for s in flat.slots if s.parameter is module._parameters.get(name)), None)
        if (
            slot is not None
            and flat.flat_param.device.type != "meta"
            and slot.sharded_view is local_tensor(slot.dtensor)
        ):
            destination[prefix + name] = _with_own_storage(slot)


def _with_own_storage(slot: FSDPParam) -> torch.Tensor:
    return make_dtensor(torch.from_dlpack(slot.sharded_view), slot.dtensor)


_SWAPPED_IN = "_fsdp_shown"
"""Attribute of a plain parameter that stands for a sharded one."""


def own_slots(module: nn.Module) -> Iterator[tuple[str, FSDPParam]]:
    """The sharded parameters that a module itself holds, by attribute, in registration order."""
    reads = module.__dict__.get(READS, {})
    for attribute in module._parameters:
        if attribute in reads:
            slots = reads[attribute][2].slots
            yield attribute, next(slot for slot in slots if (module, attribute) in slot.module_refs)


def swap_in_full(slot: FSDPParam, full: torch.Tensor) -> nn.Parameter:
    """Makes every module that holds a parameter hold a plain one with the value `full` instead."""
    plain = nn.Parameter(full, requires_grad=slot.parameter.requires_grad)
    for name, mark in vars(slot.parameter).items():  # that users and libraries put on parameters
        setattr(plain, name, mark)
    setattr(plain, _SWAPPED_IN, True)
    _hold(slot, plain)
    return plain


def is_swapped_in(parameter: torch.Tensor) -> bool:
    """Whether a plain parameter stands for a sharded one."""
    return _SWAPPED_IN in vars(parameter)


def swap_in_sharded(slot: FSDPParam) -> None:
    """Makes every module that holds a parameter hold the sharded one again."""
    _hold(slot, slot.parameter)


def swapped_in(slot: FSDPParam) -> nn.Parameter | None:
    """What the first module that holds a parameter holds now; code may have put another one there."""
    module, attribute = slot.module_refs[0]
    return module._parameters.get(attribute)


def _hold(slot: FSDPParam, parameter: nn.Parameter) -> None:
    for module, attribute in slot.module_refs:
        module._parameters[attribute] = parameter
