"""Moving whole values between ranks outside of graphs: one parameter or buffer at a time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile._torch.distributed import collectives, resolve_group
from fsdp_compile.layout.messages import EagerBuilder, full_parameter, gradient_rows
from fsdp_compile.layout.spec import UnshardSpec

CHUNK_BYTES = 250 * 2**20
"""Size of the largest message: larger values are sent in chunks."""
_EAGER = EagerBuilder()


def gather(local: torch.Tensor, spec: UnshardSpec) -> torch.Tensor:
    """The full value on every rank, in the stored dtype; all ranks of the shard group call it together.

    Args:
        local: This rank's part, without padding.
        spec: Of the parameter.

    Returns:
        A tensor of the parameter's shape in memory of its own, on the device that communicates.
    """
    piece = padded(local, spec)
    if spec.size > 1:
        piece = collectives.wait_tensor(collectives.all_gather_into_tensor(piece, spec.size, spec.group))
    return _whole(piece, spec)


def gather_to_first(local: torch.Tensor, spec: UnshardSpec) -> torch.Tensor | None:
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


def scatter_from_first(full: torch.Tensor | None, like: torch.Tensor, spec: UnshardSpec) -> torch.Tensor:
    """This rank's part of the value of the first rank of the shard group.

    Args:
        full: The full value on the first rank; ignored on others.
        like: This rank's part before: its shape, dtype and device.
        spec: Of the parameter.
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


def share_among_replicas(shard: torch.Tensor, spec: UnshardSpec) -> None:
    """Overwrites a contiguous tensor with that of the first replica's rank at the same place."""
    if spec.replicas > 1:
        _broadcast(shard, spec, spec.replicate_group)


def broadcast(value: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Overwrites a contiguous tensor with that of the first rank of a group, in chunks of `CHUNK_BYTES`."""
    message = as_bytes(value)
    for chunk in _chunks(message.numel(), 1):
        dist.broadcast(message[chunk], group=group, group_src=0)


def _chunks(count: int, bytes_each: int) -> Iterator[slice]:
    """Slices of `count` elements, each of at most `CHUNK_BYTES`."""
    step = max(1, CHUNK_BYTES // bytes_each)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _broadcast(value: torch.Tensor, spec: UnshardSpec, group: str) -> None:
    sent = value.to(wire_device(value, spec))
    broadcast(sent, group_named(group))
    if sent is not value:
        value.copy_(sent)


def wire_device(local: torch.Tensor, spec: UnshardSpec) -> torch.device:
    """The device on which a shard's group communicates."""
    # An offloaded shard is on the host, its group is not.
    return torch.device(spec.compute) if spec.compute else local.device


def is_first_replica(spec: UnshardSpec) -> bool:
    """Whether this rank belongs to the first shard group of its mesh."""
    return spec.replicas == 1 or dist.get_rank(group_named(spec.replicate_group)) == 0


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that graphs know by `name`."""
    group = resolve_group(name)
    assert group is not None, f"{name} was destroyed"
    return group


def padded(local: torch.Tensor, spec: UnshardSpec) -> torch.Tensor:
    """This rank's part as the `[extent]` elements that it sends, on the device that communicates."""
    piece = local.new_zeros(spec.extent, device=wire_device(local, spec))
    piece[: local.numel()].view(local.shape).copy_(local)
    return piece


def rows_of(full: torch.Tensor, spec: UnshardSpec) -> torch.Tensor:
    """A full value as `[size, extent]`, padding zero: row r is rank r's part."""
    return gradient_rows(_EAGER, full, spec).contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, which every backend sends unchanged whatever the dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _whole(message: torch.Tensor, spec: UnshardSpec) -> torch.Tensor:
    full = full_parameter(_EAGER, message, spec, start=0, span=spec.extent)
    # State dicts are saved with the whole storage behind them, so padding must not stay in it.
    return full if full.untyped_storage().nbytes() == math.prod(spec.shape) * full.element_size() else full.clone()


def _parts(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a buffer consists of: itself, or those inside of a tensor subclass."""
    if not hasattr(type(value), "__tensor_flatten__"):
        yield value
        return
    attributes, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        yield from _parts(getattr(value, attribute))


def wire_of(mesh: DeviceMesh) -> torch.device:
    """The device from which the groups of a mesh send."""
    return torch.device(mesh.device_type)


def overwrite(value: torch.Tensor, mesh: DeviceMesh) -> None:
    """Overwrites a tensor, or all that a tensor subclass consists of, with that of the first rank of a mesh."""
    for part in _parts(value):
        sent = part.to(wire_of(mesh)).contiguous()
        broadcast_from_first_rank(sent, mesh)
        if sent is not part:
            part.copy_(sent)


def share_text(text: str, mesh: DeviceMesh) -> str:
    """The text of the first rank of a mesh, on every rank."""
    return share_bytes(text.encode(), mesh).decode()


def share_bytes(data: bytes, mesh: DeviceMesh) -> bytes:
    """The bytes of the first rank of a mesh, on every rank."""
    message = torch.tensor(list(data), dtype=torch.uint8, device=wire_of(mesh))
    length = torch.tensor([message.numel()], device=wire_of(mesh))
    broadcast_from_first_rank(length, mesh)
    if not is_first(mesh):
        message = torch.empty(int(length.item()), dtype=torch.uint8, device=wire_of(mesh))
    broadcast_from_first_rank(message, mesh)
    return bytes(message.tolist())


def is_first(mesh: DeviceMesh) -> bool:
    """Whether this is the first rank of a mesh."""
    return bool(mesh.get_rank() == mesh.mesh.flatten()[0].item())


def broadcast_from_first_rank(value: torch.Tensor, mesh: DeviceMesh) -> None:
    """Overwrites a contiguous tensor with that of the first rank of a mesh."""
    for dim in range(mesh.ndim):
        # Over replicas first: then the first rank of each shard group has the value that the group gets.
        broadcast(value, mesh.get_group(dim))


def all_reduce_max(value: torch.Tensor, mesh: DeviceMesh) -> None:
    """Reduces a tensor to the largest of all ranks' values, in place."""
    for dim in range(mesh.ndim):
        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(dim))


def fingerprint(device: torch.device) -> int:
    """A number that identifies the state of the default generators of the CPU and of `device`."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    digest = hashlib.sha256(b"".join(bytes(state.tolist()) for state in states)).digest()
    return int.from_bytes(digest[:7], "big")  # 7 bytes: its negative fits into an int64, too
