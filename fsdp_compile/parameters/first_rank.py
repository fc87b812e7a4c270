"""`fully_shard(sync_module_states=True)`: every rank begins with the values of the mesh's first one.

Ranks other than the first need no values: what they have on the meta device gets memory for its shard alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import RankMismatchError
from fsdp_compile.parameters import exchange
from fsdp_compile.parameters.groups import device_on
from fsdp_compile.parameters.materialize import allocate
from fsdp_compile.parameters.places import Place
from fsdp_compile.parameters.source import Source
from fsdp_compile.parameters.unit import Unit

_OPTION = "fully_shard(sync_module_states=True)"


@dataclasses.dataclass
class FirstRankValues:
    """What the first rank has; looked at before parameters are sharded, since full ones are gone afterwards.

    Attributes:
        mesh: The ranks.
        parameters: Places whose parameters have a value on the first rank. There, with the full value.
        buffers: Names of the buffers that have a value on the first rank.
    """

    mesh: DeviceMesh
    parameters: dict[Place, torch.Tensor | None]
    buffers: list[str]

    def send(self, root: nn.Module, units: Iterable[Unit], device: torch.device | None) -> None:
        """Gives each rank its part of the first rank's parameters, and all of its buffers.

        Args:
            root: The module that was sharded.
            units: Units that hold the parameters.
            device: Where memory goes that a rank lacks; by default the current device of the mesh's kind.
        """
        if not self.parameters and not self.buffers:
            return
        units = list(units)
        device = device or device_on(self.mesh, None, where=_OPTION)
        for unit in units:
            lacking = [s for s in unit.slots if s.parameter.is_meta and s.owners[0] in self.parameters]
            allocate(unit, lacking, device)
        slots = {slot.owners[0]: slot for unit in units for slot in unit.slots}
        with torch.no_grad():
            for place in list(self.parameters):
                slot = slots[place]
                exchange.take_from_first(slot.local, self.parameters.pop(place), slot.spec)
            given = give_memory(root, set(self.buffers), device)
            for name in self.buffers:
                overwrite(given[name], self.mesh)


def look(
    root: nn.Module, parameters: Iterable[tuple[str, Place, nn.Parameter]], mesh: DeviceMesh, source: Source
) -> FirstRankValues:
    """Agrees on what the first rank has values for. All ranks of the mesh call it together.

    Args:
        root: The module that is about to be sharded.
        parameters: Name, place and value of each parameter that will be; the same order on all ranks.
        mesh: The ranks.
        source: Whose values count; with `EACH_RANK` there is nothing to agree on, and nothing will be sent.

    Raises:
        RankMismatchError: On all ranks, if they hold different models, or one has a value where the first has none.
    """
    if source is Source.EACH_RANK:
        return FirstRankValues(mesh, {}, [])
    listed = list(parameters)
    buffers = {name: buffer for name, buffer in root.named_buffers() if not isinstance(buffer, DTensor)}
    states: dict[str, torch.Tensor] = {**{name: p for name, _, p in listed}, **buffers}
    _refuse_different_models(states, mesh)
    mine = torch.tensor([not t.is_meta for t in states.values()], dtype=torch.uint8, device=_wire(mesh))
    firsts = mine.clone()
    broadcast(firsts, mesh)
    _refuse_missing(list(states), mine > firsts, mesh)
    has_value = dict(zip(states, firsts.tolist(), strict=True))
    first = is_first(mesh)
    held = {place: p.detach() if first else None for name, place, p in listed if has_value[name]}
    return FirstRankValues(mesh, held, [name for name in buffers if has_value[name]])


def _refuse_different_models(states: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
    text = repr([(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in states.items()])
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    bounds = torch.tensor([digest, -digest], device=_wire(mesh))
    _all_reduce_max(bounds, mesh)
    if bounds[0].item() != -bounds[1].item():
        raise RankMismatchError(
            "ranks hold parameters or buffers of different names, shapes, dtypes or requires_grad",
            where=_OPTION,
            instead="the same model on every rank",
        )


def _refuse_missing(names: list[str], missing: torch.Tensor, mesh: DeviceMesh) -> None:
    """Refuses values that some rank has and the first has not."""
    missing = missing.to(torch.int64)
    _all_reduce_max(missing, mesh)
    if missing.any():
        raise RankMismatchError(
            "the first rank has it on the meta device, and another rank has a value",
            where=f"{_OPTION}, {names[int(missing.argmax())]}",
            instead="a value on the first rank, or meta on all ranks and a param_init_fn",
        )


def give_memory(root: nn.Module, wanted: set[str], device: torch.device) -> dict[str, torch.Tensor]:
    """Replaces wanted buffers that are on meta; returns all wanted ones by name."""
    names = {buffer: name for name, buffer in root.named_buffers() if name in wanted}
    held: dict[str, torch.Tensor] = {}
    for module in root.modules():
        for attribute, buffer in module._buffers.items():
            if buffer is None or buffer not in names:
                continue
            name = names[buffer]
            if name not in held:
                held[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer
            module._buffers[attribute] = held[name]
    return held


def _parts(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a buffer consists of: itself, or those inside of a tensor subclass."""
    if not hasattr(type(value), "__tensor_flatten__"):
        yield value
        return
    attributes, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        yield from _parts(getattr(value, attribute))


def _wire(mesh: DeviceMesh) -> torch.device:
    return torch.device(mesh.device_type)


def overwrite(value: torch.Tensor, mesh: DeviceMesh) -> None:
    """Gives a tensor, or all that a tensor subclass consists of, the values of the first rank of a mesh."""
    for part in _parts(value):
        sent = part.to(_wire(mesh)).contiguous()
        broadcast(sent, mesh)
        if sent is not part:
            part.copy_(sent)


def share_text(text: str, mesh: DeviceMesh) -> str:
    """What the first rank of a mesh says."""
    message = torch.tensor(list(text.encode()), dtype=torch.uint8, device=_wire(mesh))
    length = torch.tensor([message.numel()], device=_wire(mesh))
    broadcast(length, mesh)
    if not is_first(mesh):
        message = torch.empty(int(length.item()), dtype=torch.uint8, device=_wire(mesh))
    broadcast(message, mesh)
    return bytes(message.tolist()).decode()


def is_first(mesh: DeviceMesh) -> bool:
    """Whether this is the first rank of a mesh."""
    return bool(mesh.get_rank() == mesh.mesh.flatten()[0].item())


def broadcast(value: torch.Tensor, mesh: DeviceMesh) -> None:
    """Over replicas first: then the first rank of each shard group has what the others of the group get."""
    for dim in range(mesh.ndim):
        exchange.broadcast(value, mesh.get_group(dim))


def _all_reduce_max(value: torch.Tensor, mesh: DeviceMesh) -> None:
    for dim in range(mesh.ndim):
        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group(dim))
