"""`fully_shard(device_id=...)`: on which device a model is sharded, and what is moved there."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compile.config.policy import Offload
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.classes import original_class
from fsdp_compile.runtime.module_state import stored_parameters
from fsdp_compile.runtime.units import UnitPolicy

Device = torch.device | str | int
_OPTION = "fully_shard(device_id=...)"


def kind_of(root: nn.Module, device_id: Device | None, offload: Offload | None = None) -> str:
    """The device type for a new mesh: of the given device, of the parameters, or of the machine."""
    if isinstance(device_id, str | torch.device):
        return torch.device(device_id).type
    # Parameters that are offloaded are on the host, whatever the mesh communicates on.
    parameter = next(stored_parameters(root), None)
    if device_id is None and offload is None and parameter is not None and not parameter.is_meta:
        return parameter.device.type
    # A build for CUDA names it as its accelerator on machines without a GPU, too.
    accelerator = (
        torch.accelerator.current_accelerator(check_available=True) if torch.accelerator.is_available() else None
    )
    return "cpu" if accelerator is None else accelerator.type


def chosen(mesh: DeviceMesh, device_id: Device | None) -> torch.device | None:
    """Where shards and buffers go; `None` if no device was asked for.

    Raises:
        ConfigError: If the device is of another type than the mesh, or does not exist.
    """
    if device_id is None:
        return None
    device = device_on(mesh, device_id, where=_OPTION)
    if device.index is not None and isinstance(device_id, str | torch.device) and torch.device(device_id).index is None:
        warnings.warn(
            f"device_id={str(device_id)!r} has no index: this rank takes its current device, {device}. Each rank needs "
            "its own: call set_device() first, or give the index",
            stacklevel=3,
        )
    return device


def refuse_misplaced(root: nn.Module, ignored: Container[int], target: torch.device | None, policy: UnitPolicy) -> None:
    """Raises `ConfigError` for parameters on several devices, or on the CPU without offload and the mesh elsewhere."""
    refuse_mixture(root, ignored, target)
    if policy.offload is None:
        refuse_left_behind(root, ignored, target, policy.mesh)


def refuse_mixture(root: nn.Module, ignored: Container[int], target: torch.device | None) -> None:
    """Raises `ConfigError` for parameters on several devices, but for those on meta and those that `target` moves."""
    first: dict[torch.device, str] = {}
    for name, parameter in root.named_parameters():
        if id(parameter) not in ignored and not parameter.is_meta:
            first.setdefault(destination(parameter, target) or parameter.device, name)
    if len(first) > 1:
        raise ConfigError(
            "parameters lie on several devices: " + ", ".join(f"{name} on {device}" for device, name in first.items()),
            where="fully_shard(module)",
            instead="model.to(device) before, device_id= if all others are on the CPU, or list some in ignored_params",
        )
    if target is not None and first and target not in first:
        device, name = next(iter(first.items()))
        raise ConfigError(
            f"parameters lie on {device}, and device_id is {target}",
            where=f"{_OPTION}, {name}",
            instead=f"model.to({str(target)!r}) before: only what is on the CPU is moved",
        )


def refuse_left_behind(root: nn.Module, ignored: Container[int], target: torch.device | None, mesh: DeviceMesh) -> None:
    """Raises `ConfigError` for plain parameters that stay on the CPU, where the mesh's groups cannot gather them."""
    kind = mesh.device_type
    if kind == "cpu" or target is not None:
        return
    for name, parameter in root.named_parameters():
        is_left_alone = id(parameter) in ignored or parameter.is_meta or isinstance(parameter, DTensor)
        if not is_left_alone and parameter.device.type == "cpu":
            raise ConfigError(
                f"{name} is on the CPU, and the mesh communicates on {kind}",
                where=f"fully_shard({original_class(root).__name__}), parameter {name}",
                instead=f'model.to("{kind}") before; device_id=torch.{kind}.current_device(), which moves each rank\'s '
                "part alone; or offload_policy=CPUOffloadPolicy() to leave shards on the host",
            )


def destination(tensor: torch.Tensor, target: torch.device | None) -> torch.device | None:
    """Where `fully_shard` moves a tensor: from the CPU to `target`, else nowhere."""
    return target if tensor.device.type == "cpu" else None


def move_buffers(root: nn.Module, target: torch.device, left_alone: Iterable[nn.Module]) -> None:
    """Moves buffers of `root` from the CPU to `target`, but for those in the modules of `left_alone`."""
    skipped = {part for module in left_alone for part in module.modules()}
    moved: dict[torch.Tensor, torch.Tensor] = {}  # several modules may hold one buffer
    for module in root.modules():
        for name, buffer in module._buffers.items() if module not in skipped else ():
            if buffer is not None and destination(buffer, target) not in (None, buffer.device):
                moved.setdefault(buffer, buffer.to(target))
                module._buffers[name] = moved[buffer]


def device_on(mesh: DeviceMesh, device: torch.device | str | int | None, *, where: str) -> torch.device:
    """The device that a user chose for this rank, or the current one of the mesh's type.

    Args:
        mesh: Of the sharded parameters.
        device: A device, an index, or `None`.
        where: The argument, for errors.

    Raises:
        ConfigError: If it is of another type than the mesh, or does not exist.
    """
    kind = mesh.device_type
    if isinstance(device, int) and not isinstance(device, bool):
        chosen = torch.device(kind) if kind == "cpu" else torch.device(kind, device)
    elif device is None or isinstance(device, str | torch.device):
        chosen = torch.device(kind if device is None else device)
    else:
        raise ConfigError(f"{device!r} is no device", where=where, instead="a torch.device, or the index of one")
    if chosen.type != kind or (kind == "cpu" and isinstance(device, int)):
        raise ConfigError(
            f"device {device!r} is not one of the mesh, which communicates on {kind}",
            where=where,
            instead=f'a {kind} device, or another mesh: fully_shard(..., mesh=init_device_mesh("{chosen.type}", ...))',
        )
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(chosen)
    index = module.current_device() if chosen.index is None else chosen.index
    if index >= module.device_count():
        raise ConfigError(
            f"device {index} does not exist: there are {module.device_count()}",
            where=where,
            instead='int(os.environ["LOCAL_RANK"]), the number of this process on its machine',
        )
    return torch.device(kind, index)
