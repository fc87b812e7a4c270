"""A copy of a model that has shapes and no values, which is traced instead of the user's own.

Its parameters stay on meta. Flat buffers, what is not sharded, buffers and inputs are hollow: CPU tensors that have an
address and were never written, so the system gives them no memory.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.fully_shard import PreHook, lazy_init_on_meta, offloads
from fsdp_compile._torch.tensors import FakeTensor
from fsdp_compile.config.policy import AnyOffloadPolicy, as_offload
from fsdp_compile.cost.sizes import concrete
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.fsdp2.module_class import refresh_reads, set_flat, user_class
from fsdp_compile.fsdp2.take_over import sharded_root, take_over
from fsdp_compile.fsdp2.unit import Model
from fsdp_compile.fsdp2.updates import update_as
from fsdp_compile.sharding.fully_shard import fully_shard

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
        if _is_extended(parameter):
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


def _is_extended(parameter: nn.Parameter) -> bool:
    """Whether a parameter is more than its elements, or has methods of the protocol of all-gather extensions."""
    is_plain = issubclass(type(parameter), FakeTensor | nn.Parameter)
    return not is_plain or any(hasattr(parameter, f"fsdp_{when}_all_gather") for when in ("pre", "post"))


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


def shard_stand_in(model: nn.Module, *, offload_policy: AnyOffloadPolicy = None, **sharding: Any) -> Model:
    """Shards a stand-in as `fully_shard` with these arguments, and gives its flat buffers and the rest addresses.

    The backend identifies flat buffers by them. The CPU stands for a device that is not there, to which offloaded
    shards are copied.
    """
    is_offloaded = isinstance(as_offload(offload_policy), CPUOffloadPolicy)
    offload = CPUOffloadPolicy(pin_memory=False) if is_offloaded else OffloadPolicy()
    whole = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None]
    fully_shard(model, offload_policy=offload, **sharding)
    for module, name, old in whole:
        if (new := module._parameters[name]) is not None:
            update_as(old, new)
    state = sharded_root(model)
    assert state is not None
    lazy_init_on_meta(state)
    taken = take_over(state)
    for group in taken.groups:
        group.give_memory(hollow(group.flat))
        if offloads(group.of_torch):
            for param in group.params:
                param.spec = dataclasses.replace(param.spec, compute="cpu")
        set_flat(group)
        refresh_reads(group)
    for unit in taken.units:
        unit.pre_hook = _refuse_to_gather(unit.title)
    _fill_whole_parameters(model)
    return taken


def _refuse_to_gather(title: str) -> PreHook:
    """What takes the place of FSDP2's pre-forward, which would gather values that there are not."""

    def pre_forward(module: nn.Module, *_: object) -> None:
        raise UnsupportedModelError(
            "a unit is called, or its parameters are read, in code that torch does not trace, where FSDP2 gathers them",
            where=f"explain(), unit {title}, {user_class(module).__name__}",
            instead="explain(compiled) after the first step of the compiled model",
        )

    return pre_forward


def _fill_whole_parameters(model: nn.Module) -> None:
    """Puts hollow tensors in the place of parameters on meta that no unit shards."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, DTensor):
                if parameter not in made:
                    made[parameter] = nn.Parameter(hollow(parameter.detach()), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]


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
    update_as(parameter, made)
    return made


def _zeros(shape: tuple[int, ...], stride: tuple[int, ...], **kwargs: Any) -> torch.Tensor:
    return torch.empty_strided(shape, stride, **kwargs).zero_()
