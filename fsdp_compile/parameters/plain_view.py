"""Modules that hold plain, full parameters for a while, in place of the sharded ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fsdp_compile.parameters.flat import ParameterSlot
from fsdp_compile.parameters.reads import READS

_SHOWN = "_fsdp_shown"
"""Attribute of a plain parameter that stands for a sharded one."""


def own_slots(module: nn.Module) -> Iterator[tuple[str, ParameterSlot]]:
    """The sharded parameters that a module itself holds, by attribute, in registration order."""
    reads = module.__dict__.get(READS, {})
    for attribute in module._parameters:
        if attribute in reads:
            slots = reads[attribute][2].slots
            yield attribute, next(slot for slot in slots if (module, attribute) in slot.owners)


def show(slot: ParameterSlot, full: torch.Tensor) -> nn.Parameter:
    """Makes every module that holds a parameter hold a plain one with the value `full` instead."""
    plain = nn.Parameter(full, requires_grad=slot.parameter.requires_grad)
    for name, mark in vars(slot.parameter).items():  # that users and libraries put on parameters
        setattr(plain, name, mark)
    setattr(plain, _SHOWN, True)
    _hold(slot, plain)
    return plain


def is_shown(parameter: torch.Tensor) -> bool:
    """Whether a plain parameter stands for a sharded one."""
    return _SHOWN in vars(parameter)


def hide(slot: ParameterSlot) -> None:
    """Makes every module that holds a parameter hold the sharded one again."""
    _hold(slot, slot.parameter)


def shown(slot: ParameterSlot) -> nn.Parameter | None:
    """What the first module that holds a parameter holds now; code may have put another one there."""
    module, attribute = slot.owners[0]
    return module._parameters.get(attribute)


def _hold(slot: ParameterSlot, parameter: nn.Parameter) -> None:
    for module, attribute in slot.owners:
        module._parameters[attribute] = parameter
