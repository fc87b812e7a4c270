"""Moving whole parameters between the ranks of a shard group, outside of any graph: one parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fsdp_compile._torch import collectives, resolve_group
from fsdp_compile.parameters import assemble
from fsdp_compile.parameters.spec import ReadSpec

CHUNK_BYTES = 250 * 2**20
"""The most that one message of a value from the first rank takes: larger ones go in parts."""
_EAGER = assemble.EagerBuilder()


def gather(local: torch.Tensor, spec: ReadSpec) -> torch.Tensor:
    """The full value on every rank, in the dtype that is stored. All ranks of the shard group call it together.

    Args:
        local: This rank's part, without padding.
        spec: The parameter's slot.

    Returns:
        A tensor of `spec.shape` in memory of its own, on the device that communicates.
    """
    piece = padded(local, spec)
    if spec.size > 1:
        piece = collectives.wait_tensor(collectives.all_gather_into_tensor(piece, spec.size, spec.group))
    return _whole(piece, spec)


def gather_to_first(local: torch.Tensor, spec: ReadSpec) -> torch.Tensor | None:
    """As `gather`, but only the first rank of the shard group gets the value; the others get `None`."""
    piece = padded(local, spec)
    if spec.size == 1:
        return _whole(piece, spec)
    group = group_named(spec.group)
    pieces = None
    if dist.get_rank(group) == 0:
        message = piece.new_empty(spec.size * spec.extent)
        pieces = list(message.chunk(spec.size))
    dist.gather(as_bytes(piece), [as_bytes(p) for p in pieces] if pieces else None, group=group, group_dst=0)
    return None if pieces is None else _whole(message, spec)


def scatter_from_first(full: torch.Tensor | None, like: torch.Tensor, spec: ReadSpec) -> torch.Tensor:
    """This rank's part of the value that the first rank of the shard group has, sent in chunks of `CHUNK_BYTES`.

    Args:
        full: The full value on the first rank; not looked at on others.
        like: This rank's part as it is now: its shape, dtype and device.
        spec: The parameter's slot.
    """
    group = group_named(spec.group) if spec.size > 1 else None
    rows = None
    if group is None or dist.get_rank(group) == 0:
        assert full is not None
        rows = rows_of(full.to(like.dtype), spec)
    if group is None:
        assert rows is not None
        return rows.reshape(-1)[: like.numel()].view(like.shape).to(like.device)
    wire = wire_device(like, spec)
    piece = like.new_empty(spec.extent, device=wire)
    for chunk in _chunks(spec.extent, spec.size * like.element_size()):
        sent = None if rows is None else [as_bytes(row[chunk].to(wire)) for row in rows]
        dist.scatter(as_bytes(piece[chunk]), sent, group=group, group_src=0)
    return piece[: like.numel()].view(like.shape).to(like.device)


def share_among_replicas(shard: torch.Tensor, spec: ReadSpec) -> None:
    """Overwrites a contiguous tensor with what the first replica's rank at the same place has."""
    if spec.replicas > 1:
        _broadcast(shard, spec, spec.replicate_group)


def broadcast_from_first(value: torch.Tensor, spec: ReadSpec) -> None:
    """Overwrites a contiguous tensor with what the first rank of the mesh has."""
    share_among_replicas(value, spec)
    if spec.size > 1:
        _broadcast(value, spec, spec.group)


def take_from_first(local: torch.Tensor, full: torch.Tensor | None, spec: ReadSpec) -> None:
    """Overwrites this rank's part with its part of what the first rank of the mesh has in full.

    Every other rank receives only its part, and every other replica a copy of the first one's.

    Args:
        local: This rank's part; contiguous.
        full: The full value on the first rank; not looked at on others.
        spec: The parameter's slot.
    """
    if is_first_replica(spec):
        local.copy_(scatter_from_first(full, local, spec))
    share_among_replicas(local, spec)


def broadcast(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Overwrites a contiguous tensor with what the first rank of a group has, in chunks of `CHUNK_BYTES`."""
    message = as_bytes(value)
    for chunk in _chunks(message.numel(), 1):
        dist.broadcast(message[chunk], group=group, group_src=0)


def _chunks(count: int, bytes_each: int) -> Iterator[slice]:
    """Parts of `count` elements such that the elements of one part have at most `CHUNK_BYTES` together."""
    step = max(1, CHUNK_BYTES // bytes_each)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _broadcast(value: torch.Tensor, spec: ReadSpec, group: str) -> None:
    sent = value.to(wire_device(value, spec))
    broadcast(sent, group_named(group))
    if sent is not value:
        value.copy_(sent)


def wire_device(local: torch.Tensor, spec: ReadSpec) -> torch.device:
    """The device on which a shard's group communicates: not the host's where the shard is offloaded."""
    return torch.device(spec.compute) if spec.compute else local.device


def is_first_replica(spec: ReadSpec) -> bool:
    """Whether this rank belongs to the first shard group of its mesh."""
    return spec.replicas == 1 or dist.get_rank(group_named(spec.replicate_group)) == 0


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that graphs know by `name`."""
    group = resolve_group(name)
    assert group is not None, f"{name} was destroyed"
    return group


def padded(local: torch.Tensor, spec: ReadSpec) -> torch.Tensor:
    """This rank's part as the `[extent]` elements that it sends, on the device that communicates."""
    piece = local.new_zeros(spec.extent, device=wire_device(local, spec))
    piece[: local.numel()].view(local.shape).copy_(local)
    return piece


def rows_of(full: torch.Tensor, spec: ReadSpec) -> torch.Tensor:
    """A full value as `[size, extent]`, padding zero: row r is what rank r holds."""
    return assemble.gradient_rows(_EAGER, full, spec).contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: sent like that, every dtype arrives bit by bit over every backend."""
    return tensor.reshape(-1).view(torch.uint8)


def _whole(message: torch.Tensor, spec: ReadSpec) -> torch.Tensor:
    full = assemble.full_parameter(_EAGER, message, spec, start=0, span=spec.extent)
    # State dicts are saved with the whole storage behind them, so padding must not stay in it.
    return full if full.untyped_storage().nbytes() == math.prod(spec.shape) * full.element_size() else full.clone()
