"""A parameter's own attributes (`p.tag = ...`), which a forward finds on the gathered parameter as on the plain one.

The gathered parameter is another tensor in each forward. It gets the attributes that the sharded parameter has at that
time; Dynamo guards on their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_compile.runtime.replaced_params import current

PARAM_ATTRIBUTES = "_fsdp_param_attributes"
"""Attribute of a module: parameter name to the `__dict__` of the sharded parameter, for those that have attributes."""
_NOT_USERS = ("_is_param", "_dynamo_", "_fsdp_")
"""Starts of names that torch and this package put on parameters."""


def note_attributes(module: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Records the attributes of some of a module's sharded parameters, for its reads; returns which have any."""
    held = {name: module._parameters.get(name) for name in names}
    found = {name: vars(param) for name, param in held.items() if param is not None and has_attributes(param)}
    if found:
        object.__setattr__(module, PARAM_ATTRIBUTES, found)
    elif PARAM_ATTRIBUTES in module.__dict__:
        object.__delattr__(module, PARAM_ATTRIBUTES)
    return frozenset(found)


def is_noted(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether reads of a module's sharded parameters know the attributes that these have now."""
    noted = module.__dict__.get(PARAM_ATTRIBUTES, {})
    held = {name: module._parameters.get(name) for name in names}
    return all(
        noted.get(name) is (vars(param) if has_attributes(param) else None)
        for name, param in held.items()
        if param is not None
    )


def follow_replaced(parameter: torch.Tensor) -> None:
    """Makes attributes that refer to plain parameters which were sharded since refer to the sharded ones."""
    for name, value in list(vars(parameter).items()):
        if isinstance(value, torch.Tensor) and current(value) is not value:
            setattr(parameter, name, current(value))


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes that users and libraries put on a parameter, as they are now."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith(_NOT_USERS)}


def take_changes(source: torch.Tensor, before: Mapping[str, Any], target: torch.Tensor) -> None:
    """Gives one parameter the attributes of users and libraries that another one got or lost since it had `before`."""
    now, held = attributes_of(source), vars(target)  # reads look at this very dict
    for name in before.keys() - now.keys():
        held.pop(name, None)
    held.update({name: value for name, value in now.items() if name not in before or before[name] is not value})


def has_attributes(parameter: torch.Tensor) -> bool:
    """Whether users or libraries put attributes on a parameter."""
    return any(not name.startswith(_NOT_USERS) for name in vars(parameter))


def with_attributes(full: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    """Puts the attributes of a sharded parameter on its gathered value; compiled code traces this."""
    for name, value in attributes.items():
        if not name.startswith(_NOT_USERS):
            setattr(full, name, value)
    return full
