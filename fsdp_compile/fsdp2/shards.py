"""Sharded parameters as DTensors: full values, parts of full values, and what ranks tell one another about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile._torch import fully_shard as fsdp2
from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile._torch.dynamo import OptimizedModule
from fsdp_compile._torch.fully_shard_calls import forward_in_progress
from fsdp_compile._torch.fully_shard_params import TorchParam, refs_of, sharded_param, tie_again
from fsdp_compile._torch.tensors import local_tensor, make_dtensor, memory_id
from fsdp_compile.comm import alike
from fsdp_compile.errors import ConfigError, RankMismatchError

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""What torch puts into names where a compiled module is, or one that is checkpointed by its `checkpoint_wrapper`."""

_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State of torch's optimizers that is one number."""


def unwrap(model: nn.Module) -> nn.Module:
    """The module that was compiled, or `model` itself."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def plain_name(name: str) -> str:
    """The name in the plain model of a parameter or buffer in one that is compiled or checkpointed in parts."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def shard_between_steps(module: nn.Module, where: str, *, instead: str) -> None:
    """Makes every parameter below `module` that is sharded a DTensor again, tied ones the same; no communication.

    Raises:
        ConfigError: Inside of a forward or a backward.
    """
    is_in_backward = backward_in_progress() != -1
    if is_in_backward or forward_in_progress(module):
        raise ConfigError(
            "parameters are needed as a whole, inside a step",
            where=f"{where} in a {'backward' if is_in_backward else 'forward'}",
            instead=instead,
        )
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
            state = fsdp2.state_of(part)
            for group in () if state is None else fsdp2.groups_of(state):
                tie_again(fsdp2.params_of(group))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank, which writes in place reach."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def full_value(value: DTensor) -> torch.Tensor:
    """The full tensor, in memory of its own. All ranks of the mesh call it."""
    full = value.full_tensor().detach()
    return full.clone() if memory_id(full) == memory_id(value) else full


@torch.no_grad()
def own_part(full: torch.Tensor, like: DTensor, *, source: int | None = None) -> torch.Tensor:
    """This rank's part of a full tensor of the shape of `like`, on the device of that, in memory of its own.

    Either every rank has the values, or `source`, a rank of the mesh's dimensions, which sends them.
    """
    split = distribute_tensor(full.detach(), like.device_mesh, like.placements, src_data_rank=source)
    device = local_tensor(like).device
    return local_tensor(split).to(device, copy=True, memory_format=torch.contiguous_format)


def shard_like(full: torch.Tensor, like: DTensor, *, source: int | None = None) -> DTensor:
    """A full tensor as a DTensor, laid out as `like` is; the arguments are those of `own_part`."""
    return make_dtensor(own_part(full, like, source=source), like)


def meshes_of(tensors: Iterable[torch.Tensor]) -> list[DeviceMesh]:
    """The meshes of those that are DTensors, the largest one first."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return sorted(meshes, key=lambda mesh: mesh.size(), reverse=True)


def torch_params(tensors: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[TorchParam, DeviceMesh]]:
    """FSDP2's objects of those that are sharded parameters, with the data-parallel meshes that it shards them over."""
    wanted = set(tensors)
    return {p: found for found in _all_torch_params() if (p := sharded_param(found[0])) in wanted}


def _all_torch_params() -> Iterator[tuple[TorchParam, DeviceMesh]]:
    for state in {fsdp2.state_of(module): None for module in fsdp2.sharded_modules()}:
        for group in () if state is None else fsdp2.groups_of(state):
            for param in fsdp2.params_of(group):
                yield param, fsdp2.mesh_of(group)


def require_alike(parts: Mapping[str, nn.Module], where: str) -> None:
    """Compares over ranks what modules have where FSDP2 has sharded a parameter, before they gather it together.

    Raises:
        RankMismatchError: On all ranks, if one has put a parameter of another kind, shape or dtype in such a place.
    """
    names = {part: name for name, part in parts.items()}
    described: dict[DeviceMesh, dict[str, str]] = {}
    for param, mesh in _all_torch_params():
        for module, attribute in refs_of(param):
            if module in names:
                held = module._parameters.get(attribute)
                text = "missing" if held is None else f"a {type(held).__name__} {tuple(held.shape)} of {held.dtype}"
                described.setdefault(mesh, {})[plain_name(f"{names[module]}.{attribute}".removeprefix("."))] = text
    what = "parameters in a sharded model"
    instead = "the same changes of the model on every rank; inside of full_params() a parameter may be replaced"
    meshes = {mesh: [mesh.get_group(dim) for dim in range(mesh.ndim)] for mesh in described}
    refused: RankMismatchError | None = None
    for mesh, groups in meshes.items():
        device = torch.device(mesh.device_type)
        try:
            alike.require(described[mesh], groups, device, what=what, where=where, instead=instead)
        except RankMismatchError as error:
            refused = refused or error
    # Ranks that share another mesh with those would wait for them in its gathers.
    is_refused = refused is not None
    for mesh, groups in meshes.items() if len(meshes) > 1 else ():
        is_refused = alike.is_any(is_refused, groups, torch.device(mesh.device_type))
    if is_refused:
        raise refused or RankMismatchError(f"other ranks have different {what}", where=where, instead=instead)


def is_first(tensors: Iterable[torch.Tensor], where: str, *, sends: bool = False) -> bool:
    """Whether this is the first rank of all meshes, to whom `rank0_only` refers; also without any.

    Args:
        tensors: On the meshes, if they are DTensors.
        where: The call, in an error.
        sends: Whether it sends values to all ranks of each mesh: then meshes of tensor parallelism count, too.

    Raises:
        ConfigError: If they have different first ranks: what the others have would be lost.
    """
    tensors = list(tensors)
    firsts = {_first_rank(mesh) for mesh in meshes_of(tensors)}
    different = firsts if sends else {_first_rank(mesh) for _, mesh in torch_params(tensors).values()}
    if len(different) > 1:
        raise ConfigError(
            f"parameters are on meshes whose first ranks are {sorted(different)}",
            where=where,
            instead="values on all ranks, or one call for each part of the model that has a mesh of its own",
        )
    return not firsts or firsts == {dist.get_rank()}


def _first_rank(mesh: DeviceMesh) -> int:
    return int(mesh.mesh.flatten()[0].item())


def union(said: Mapping[Any, Any], meshes: Iterable[DeviceMesh]) -> dict[Any, Any]:
    """What ranks of some meshes say, together; of two values under one key the one of an earlier rank.

    It goes through pickle. The ranks of the meshes call it together, in this order.
    """
    merged = dict(said)
    for mesh in meshes:
        for dim in reversed(range(mesh.ndim)):
            heard: list[Any] = [None] * mesh.size(dim)
            dist.all_gather_object(heard, merged, group=mesh.get_group(dim))
            merged = {key: value for each in reversed(heard) for key, value in each.items()}
    return merged


def is_number(key: object, value: torch.Tensor) -> bool:
    """Whether state of this name is one number, and not a value for each element of a parameter."""
    return key in _NUMBERS and (value.dim() == 0 or (key == "step" and value.numel() == 1))


def give_storages(module: nn.Module, destination: dict[str, Any], prefix: str, _: object) -> None:
    """A hook of `state_dict()`: makes the shards of a module in it such that they can be saved and copied."""
    for name, parameter in module._parameters.items():
        value = destination.get(prefix + name)
        if value is parameter or not isinstance(value, DTensor):  # the first: `keep_vars=True`
            continue
        local = local_tensor(value)
        if type(local) is torch.Tensor and not local.is_meta:
            # torch saves and copies a DTensor only if its local tensor begins where its storage begins, and saves
            # whole storages.
            destination[prefix + name] = make_dtensor(torch.from_dlpack(local), value)
