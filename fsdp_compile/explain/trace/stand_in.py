"""A copy of a model that has shapes and no values, which is traced instead of the user's own.

Its parameters are on meta until they are sharded. Flat parameters, buffers and inputs are hollow: CPU tensors that have
an address and were never written, so the system gives them no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.comm.gather_extension import is_extended
from fsdp_compile.cost.sizes import concrete
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.modules.classes import gather_params
from fsdp_compile.runtime import update_in_backward
from fsdp_compile.runtime.module_state import units
from fsdp_compile.runtime.units import FSDPParamGroup

M = TypeVar("M", bound=nn.Module)


def stand_in(model: M) -> M:
    """Copies a model without its values; the model itself is only read.

    Raises:
        ConfigError: If something in the model cannot be copied.
        UnsupportedModelError: If a parameter has an all-gather extension, which asks for values, or a tensor is split.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _refuse_split(tensor, f"explain({type(model).__name__}), {name}")
    for name, parameter in model.named_parameters():
        if is_extended(parameter):
            raise UnsupportedModelError(
                f"a parameter of class {type(parameter).__qualname__} says by itself how it is gathered (an all-gather "
                "extension), and its methods may ask for values, which this copy of the model has not",
                where=f"explain({type(model).__name__}), {name}",
                instead="explain(compiled) after the first step of the compiled model",
            )
    memo: dict[int, Any] = {}
    for tensor in _tensors(model):
        memo[id(tensor)] = _meta_parameter(tensor) if isinstance(tensor, nn.Parameter) else hollow(tensor)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be copied: {error}",
            where=f"explain({type(model).__name__})",
            instead="keep process groups, locks, files and results of earlier computations out of its attributes",
        ) from error


def hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same type, unwritten; a dynamic size becomes the one with which it was traced.

    Raises:
        UnsupportedModelError: For a `DTensor`.
    """
    _refuse_split(tensor, "explain(model, ...), a tensor among its arguments or attributes")
    make = torch.empty_strided if tensor.is_floating_point() else _zeros
    shape, strides = (tuple(concrete(n) for n in of) for of in (tensor.shape, tensor.stride()))
    made = make(shape, strides, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def hollow_flats(model: nn.Module) -> None:
    """Gives the meta flat parameters of a sharded stand-in addresses, which the backend identifies them by."""
    for unit in units(model):
        unit.param_groups = [FSDPParamGroup(unit, _hollow_leaf(flat), flat.params) for flat in unit.param_groups]
        gather_params(unit.param_groups)


def _refuse_split(tensor: torch.Tensor, where: str) -> None:
    if isinstance(tensor, DTensor):
        raise UnsupportedModelError(
            f"a DTensor is split over mesh {tensor.device_mesh.mesh_dim_names} (as by tensor or expert parallelism), "
            "and this copy of the model has whole tensors",
            where=where,
            instead="explain(compiled) after the first step of the compiled model, or explain the model before it is "
            "split",
        )


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


def _meta_parameter(parameter: nn.Parameter) -> nn.Parameter:
    meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    made = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    update_in_backward.move_updater(parameter, made)
    return made


def _hollow_leaf(flat: FSDPParamGroup) -> nn.Parameter:
    return nn.Parameter(hollow(flat.flat_param.detach()), requires_grad=flat.flat_param.requires_grad)


def _zeros(shape: tuple[int, ...], stride: tuple[int, ...], **kwargs: Any) -> torch.Tensor:
    return torch.empty_strided(shape, stride, **kwargs).zero_()
