"""CPU offload: shards that live on the host while a device computes with what is gathered from them."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

from fsdp_compile.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Offload:
    """Shards live on the host.

    Attributes:
        pinned: In page-locked memory, from which a device copies by itself.
        from_cpu_to_cpu: Graphs copy even where the host computes, which then stands for a device: for plans of devices
            that are not there.
    """

    pinned: bool
    from_cpu_to_cpu: bool = False


Policy = OffloadPolicy | CPUOffload | Offload
"""What users write: FSDP2's policies, or FSDP1's `CPUOffload`; and what they come to."""


def as_offload(policy: object) -> Offload | None:
    """What a policy asks for; `None` if parameters stay on their device.

    Raises:
        ConfigError: If it is none of torch's policies.
    """
    if isinstance(policy, Offload):
        return policy
    if isinstance(policy, CPUOffloadPolicy):
        return Offload(policy.pin_memory)
    if isinstance(policy, CPUOffload):
        return Offload(pinned=True) if policy.offload_params else None
    if type(policy) is OffloadPolicy:
        return None
    raise ConfigError(
        f"offload_policy is a {type(policy).__name__}",
        where="fully_shard(offload_policy=...)",
        instead="torch.distributed.fsdp.CPUOffloadPolicy(), or leave it out: parameters stay on their device",
    )


def planned(policy: object) -> Policy:
    """The same policy for a plan in which the CPU stands for a device that is not there.

    Raises:
        ConfigError: If it is none of torch's policies.
    """
    offload = as_offload(policy)
    return OffloadPolicy() if offload is None else Offload(pinned=False, from_cpu_to_cpu=True)


def compute_device(offload: Offload | None, mesh_device: str) -> str:
    """Type of the device to which shards are copied; empty if they live where they are computed with."""
    return mesh_device if offload is not None and (mesh_device != "cpu" or offload.from_cpu_to_cpu) else ""


def host_buffer(numel: int, dtype: torch.dtype, offload: Offload) -> torch.Tensor:
    """A flat shard of zeros on the host.

    Raises:
        ConfigError: If it is to be pinned, and there is no device to pin it for.
    """
    if not offload.pinned:
        return torch.zeros(numel, dtype=dtype)
    if not torch.accelerator.is_available():
        raise ConfigError(
            "memory is to be pinned for a device, and there is none",
            where="fully_shard(offload_policy=CPUOffloadPolicy(pin_memory=True))",
            instead="CPUOffloadPolicy(pin_memory=False), or a mesh of device type 'cpu'",
        )
    return torch.zeros(numel, dtype=dtype, pin_memory=True)


def refuse_device(name: str, device: torch.device) -> None:
    """Refuses a sharded parameter that was moved to a device although its unit lives on the host.

    Raises:
        ConfigError: If it is anywhere but on the host, or not materialized yet.
    """
    if device.type not in ("cpu", "meta"):
        raise ConfigError(
            f"the parameter was moved to {device}, and its unit is offloaded to the host",
            where=name,
            instead="leave the model on the CPU: gathered parameters go to the device by themselves; to keep shards "
            "there, call fully_shard() without offload_policy",
        )
