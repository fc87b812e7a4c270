"""Sharded parameters in state dicts, and plain, full parameters in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_compile._torch.autograd import share_hooks
from fsdp_compile._torch.tensors import local_tensor, make_dtensor
from fsdp_compile.runtime.module_state import reads_of
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup


def give_storages(
    module: nn.Module, destination: dict[str, Any], prefix: str, groups: Iterable[tuple[str, FSDPParamGroup]]
) -> None:
    """Replaces a module's sharded parameters in its state dict by DTensors that can be saved and copied.

    Args:
        module: The module that was just saved.
        destination: The state dict.
        prefix: Before each name of the module in it.
        groups: Names of sharded parameters of the module, each with the parameter group that it lies in.
    """
    for name, group in groups:
        param = next((s for s in group.params if s.parameter is module._parameters.get(name)), None)
        if (
            param is not None
            and group.flat_param.device.type != "meta"
            and not group.is_extended  # it has memory of its own
            and param.sharded_view is local_tensor(param.dtensor)
        ):
            destination[prefix + name] = _with_own_storage(param)


def _with_own_storage(param: FSDPParam) -> torch.Tensor:
    # torch saves and copies a DTensor only if its local tensor begins where its storage begins, and writes whole
    # storages: the same memory gets a storage of its own.
    return make_dtensor(torch.from_dlpack(param.sharded_view), param.dtensor)


_SWAPPED_IN = "_fsdp_shown"
"""Attribute of a plain parameter that stands for a sharded one."""


def own_params(module: nn.Module) -> Iterator[tuple[str, FSDPParam]]:
    """The sharded parameters that a module itself registers, by attribute, in registration order."""
    reads = reads_of(module)
    return ((attribute, reads[attribute].param) for attribute in module._parameters if attribute in reads)


def swap_in_full(param: FSDPParam, full: torch.Tensor) -> nn.Parameter:
    """Registers a plain parameter with the value `full` in the place of a sharded one."""
    plain = nn.Parameter(full, requires_grad=param.parameter.requires_grad)
    for name, mark in vars(param.parameter).items():  # that users and libraries put on parameters
        setattr(plain, name, mark)
    share_hooks(param.parameter, plain)
    setattr(plain, _SWAPPED_IN, True)
    _hold(param, plain)
    return plain


def is_swapped_in(parameter: torch.Tensor) -> bool:
    """Whether a plain parameter stands for a sharded one."""
    return _SWAPPED_IN in vars(parameter)


def swap_in_sharded(param: FSDPParam) -> None:
    """Registers the sharded parameter again."""
    _hold(param, param.parameter)


def _hold(param: FSDPParam, parameter: nn.Parameter) -> None:
    for module, attribute in param.module_refs:
        module._parameters[attribute] = parameter
