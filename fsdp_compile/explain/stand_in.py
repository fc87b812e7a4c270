"""A copy of a model that has shapes and no values, which is traced instead of the user's own.

Its parameters stay on meta. Flat buffers, what is not sharded, buffers and inputs are hollow: CPU tensors that have an
address and were never written, so the system gives them no memory. Its process group is the one that is there, or a
private one whose other ranks do not exist.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, ShardingStrategy
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.distributed import fake_store
from fsdp_compile._torch.fully_shard import PreHook, lazy_init_on_meta, offloads, states_below
from fsdp_compile._torch.tensors import FakeTensor
from fsdp_compile.comm.mesh import HYBRID, hybrid_mesh
from fsdp_compile.config.choices import check_world_size
from fsdp_compile.config.policy import AnyOffloadPolicy, as_offload
from fsdp_compile.cost.sizes import concrete
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.fsdp2.module_class import refresh_reads, user_class
from fsdp_compile.fsdp2.take_over import take_over
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
        is_plain = issubclass(type(parameter), FakeTensor | nn.Parameter)
        if not is_plain or any(hasattr(parameter, f"fsdp_{when}_all_gather") for when in ("pre", "post")):
            raise UnsupportedModelError(
                f"a parameter of class {type(parameter).__qualname__} defines how it is gathered (an all-gather "
                "extension), and its methods may ask for values, which this copy of the model has not",
                where=f"explain({type(model).__name__}), {name}",
                instead="explain(compiled) after the first step of the compiled model",
            )
    attributes = [value for module in model.modules() for value in vars(module).values()]
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers(), *attributes):
        if isinstance(tensor, nn.Parameter):
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = made = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            update_as(tensor, made)
        elif isinstance(tensor, torch.Tensor):
            memo[id(tensor)] = hollow(tensor)
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
    shape, strides = (tuple(concrete(n) for n in of) for of in (tensor.shape, tensor.stride()))
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
    if not tensor.is_floating_point():
        made.zero_()  # code in Python may use them as indices
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
    root = states_below(model)[0]
    lazy_init_on_meta(root)
    taken = take_over(root)
    for group in taken.groups:
        group.give_memory(hollow(group.flat))
        if offloads(group.of_torch):
            for param in group.params:
                param.spec = dataclasses.replace(param.spec, compute="cpu")
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


@contextmanager
def planning_world(world_size: int | None) -> Iterator[int]:
    """Makes sure that there is a default group of `world_size` ranks, and that nothing random is drawn for good.

    What a forward does in Python runs while it is traced, and may draw numbers; a rank that explains would then draw
    others than its neighbours do. So the states of Python's, numpy's and torch's generators are restored at the end.

    Without a number they are those of the group that is initialized.

    Yields:
        The number of ranks. A group that was made for this is destroyed at the end.

    Raises:
        ConfigError: If a group of another size is initialized, or there is none and no size is given.
    """
    was_there = dist.is_initialized()
    if was_there and world_size not in (None, dist.get_world_size()):
        held = dist.get_world_size()
        raise ConfigError(
            f"a process group of {held} ranks is initialized, and the plan is for {world_size}",
            where="explain(world_size=...)",
            instead=f"world_size={held}, or explain() in a process without a process group",
        )
    ranks = dist.get_world_size() if was_there else check_world_size(world_size)
    numpy_random = sys.modules.get("numpy.random")
    of_python = random.getstate()
    of_numpy = None if numpy_random is None else numpy_random.get_state()
    # A device that was never used has drawn nothing; to ask would set it up.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    if not was_there:
        dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        with torch.random.fork_rng(devices):
            yield ranks
    finally:
        random.setstate(of_python)
        if numpy_random is not None:
            numpy_random.set_state(of_numpy)
        if not was_there:
            dist.destroy_process_group()


def planning_mesh(strategy: ShardingStrategy | None) -> DeviceMesh:
    """A mesh of a strategy's dimension over the default group, on the device that plans are traced for."""
    if strategy in HYBRID:
        return hybrid_mesh("cpu")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
