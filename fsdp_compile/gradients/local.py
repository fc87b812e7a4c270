"""What one rank holds of a gradient, and which process groups hold the rest of it."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_compile import _torch
from fsdp_compile.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Spread:
    """Over which ranks the elements of a tensor are spread.

    Attributes:
        groups: One process group per sharded mesh dimension of more than one rank; none for a tensor that this rank
            holds whole, be it a copy of what others hold or its own.
        device: Where tensors that these groups reduce must be; `None` if there are no groups.
    """

    groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device | None = None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that this rank holds of a tensor, which writes in place reach."""
    return _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def spread_of(parameter: torch.Tensor) -> Spread:
    """Where the elements of a parameter, and of its gradient, are.

    Raises:
        ConfigError: If it is a DTensor whose ranks hold parts of a sum (`Partial`): no norm follows from parts.
    """
    if not isinstance(parameter, DTensor):
        return Spread()
    if any(placement.is_partial() for placement in parameter.placements):
        raise ConfigError(
            f"a tensor is a sum that was not made yet, with placements {parameter.placements}",
            where="clip_grad_norm_(parameters)",
            instead="tensor.redistribute(placements=...) with Replicate() in place of Partial()",
        )
    mesh = parameter.device_mesh
    dims = [d for d, p in enumerate(parameter.placements) if not p.is_replicate() and mesh.size(d) > 1]
    if not dims:
        return Spread()
    if mesh.device_type == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
    return Spread(tuple(mesh.get_group(d) for d in dims), device)
