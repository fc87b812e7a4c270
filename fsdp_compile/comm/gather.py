"""Gathering a full value in bounded memory: the value itself, and one message at a time."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.comm import exchange
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.spec import UnshardSpec

MESSAGE_BYTES = 16 * 2**20
"""Size of the largest message of `gather_full`, over all ranks."""


class Receivers(enum.Enum):
    """Which ranks get a full value."""

    ALL = "all"
    """Every rank of the mesh."""
    FIRST = "first"
    """The first rank of the mesh; other replicas of its shard group do nothing at all."""


def first_rank(meshes: Iterable[DeviceMesh], where: str) -> int:
    """The rank that gets full values if only one does, 0 without a mesh.

    Raises:
        ConfigError: If the first ranks of the meshes differ.
    """
    firsts = {int(mesh.mesh.flatten()[0].item()) for mesh in meshes} or {0}
    if len(firsts) > 1:
        raise ConfigError(
            f"units are on meshes whose first ranks are {sorted(firsts)}",
            where=f"{where} with rank0_only=True",
            instead="full values on all ranks; or one call for each part of the model that has a mesh of its own",
        )
    return firsts.pop()


def receives(spec: UnshardSpec, receivers: Receivers) -> bool:
    """Whether this rank gets the full value."""
    if receivers is Receivers.ALL:
        return True
    is_first = spec.size == 1 or dist.get_rank(exchange.group_named(spec.group)) == 0
    return is_first and exchange.is_first_replica(spec)


@torch.no_grad()
def gather_full(
    local: torch.Tensor, spec: UnshardSpec, receivers: Receivers, device: torch.device
) -> torch.Tensor | None:
    """The full value, in the stored dtype and contiguous; all ranks of the mesh call it together.

    Args:
        local: This rank's part, without padding.
        spec: Of the parameter.
        receivers: Which ranks get it.
        device: Where the full value is to be.

    Returns:
        A tensor of the parameter's shape in memory of its own; `None` on ranks that get none.
    """
    if receivers is Receivers.FIRST and not exchange.is_first_replica(spec):
        return None
    full = torch.empty(spec.shape, dtype=local.dtype, device=device) if receives(spec, receivers) else None
    if spec.size == 1 or spec.dim is None:  # every rank has all of it
        return None if full is None else full.copy_(local)
    if spec.dim == 0:
        _gather_rows(local, spec, receivers, full)
        return full
    # Rows of other dimensions lie apart in the full value.
    everything = exchange.gather(local, spec) if receivers is Receivers.ALL else exchange.gather_to_first(local, spec)
    return None if full is None or everything is None else full.copy_(everything)


def _gather_rows(local: torch.Tensor, spec: UnshardSpec, receivers: Receivers, full: torch.Tensor | None) -> None:
    """Gathers a parameter that is sharded over dimension 0 into `full`."""
    step = max(1, MESSAGE_BYTES // (spec.size * local.element_size()))
    for start in range(0, spec.shard_numel, step):
        # A call for each message, so that it is freed before the next.
        _gather_message(local, spec, receivers, full, start, min(step, spec.shard_numel - start))


def _gather_message(
    local: torch.Tensor, spec: UnshardSpec, receivers: Receivers, full: torch.Tensor | None, start: int, count: int
) -> None:
    """Gathers elements `start` to `start + count` of every rank's part."""
    piece = local.new_zeros(count, device=exchange.wire_device(local, spec))
    mine = local.reshape(-1)[start : start + count]  # fewer where this rank has fewer rows
    piece[: len(mine)].copy_(mine)
    for rank, part in enumerate(_gathered(piece, spec, receivers)):
        assert full is not None
        place = full.view(-1)[rank * spec.shard_numel + start :][:count]  # fewer where that rank has fewer rows
        place.copy_(part[: len(place)])


def _gathered(piece: torch.Tensor, spec: UnshardSpec, receivers: Receivers) -> tuple[torch.Tensor, ...]:
    """What each rank sent; nothing where nothing is received."""
    if receivers is Receivers.ALL:
        message = collectives.all_gather_into_tensor(piece, spec.size, spec.group)
        return collectives.wait_tensor(message).chunk(spec.size)
    group = exchange.group_named(spec.group)
    parts = piece.new_empty(spec.size * len(piece)).chunk(spec.size) if dist.get_rank(group) == 0 else ()
    sent = [exchange.as_bytes(part) for part in parts]
    dist.gather(exchange.as_bytes(piece), sent or None, group=group, group_dst=0)
    return parts
