"""`fully_shard(sync_module_states=True)`: every rank starts with the values of the mesh's first one.

Ranks other than the first need no values: what they have on the meta device gets memory for its shard alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import local_tensor
from fsdp_compile.comm import exchange
from fsdp_compile.comm.exchange import all_reduce_max, broadcast_from_first_rank, is_first, overwrite, wire_of
from fsdp_compile.errors import RankMismatchError
from fsdp_compile.runtime.module_state import ParamOwner
from fsdp_compile.runtime.units import FSDPUnit
from fsdp_compile.sharding.arguments import InitFrom
from fsdp_compile.sharding.devices import device_on
from fsdp_compile.sharding.views import allocate_from_meta

_OPTION = "fully_shard(sync_module_states=True)"


@dataclasses.dataclass
class FirstRankValues:
    """Values of the first rank.

    Attributes:
        parameters: Places of the parameters that have a value on the first rank, and on that rank the full value.
        buffers: Names of the buffers that have a value on the first rank.
    """

    mesh: DeviceMesh
    parameters: dict[ParamOwner, torch.Tensor | None]
    buffers: list[str]

    def send(self, root: nn.Module, units: Iterable[FSDPUnit], device: torch.device | None) -> None:
        """Sends each rank its part of the first rank's parameters, and all of its buffers.

        Args:
            root: The module that was sharded.
            units: Units of the parameters.
            device: For what is on meta; by default the current device of the mesh's type.
        """
        if not self.parameters and not self.buffers:
            return
        units = list(units)
        device = device or device_on(self.mesh, None, where=_OPTION)
        for unit in units:
            lacking = [s for s in unit.params if s.parameter.is_meta and s.module_refs[0] in self.parameters]
            allocate_from_meta(unit, lacking, device)
        params = {param.module_refs[0]: param for unit in units for param in unit.params}
        with torch.no_grad():
            for place in list(self.parameters):
                param = params[place]
                # `pop`: each full value is freed as soon as it was sent.
                exchange.take_from_first(param.sharded_view, self.parameters.pop(place), param.spec)
            given = give_memory(root, set(self.buffers), device)
            for name in self.buffers:
                overwrite(given[name], self.mesh)


def look(
    root: nn.Module, parameters: Iterable[tuple[str, ParamOwner, nn.Parameter]], mesh: DeviceMesh, source: InitFrom
) -> FirstRankValues:
    """Agrees on what the first rank has values for. All ranks of the mesh call it together.

    Args:
        root: The module that is about to be sharded.
        parameters: Name, place and value of each parameter that will be; the same order on all ranks.
        mesh: The ranks.
        source: Whose values count; but with `FIRST_RANK` there is nothing to agree on, and nothing will be sent.

    Raises:
        RankMismatchError: On all ranks, if their models differ, or one has a value where the first has none.
    """
    if source is not InitFrom.FIRST_RANK:
        return FirstRankValues(mesh, {}, [])
    listed = list(parameters)
    buffers = {name: buffer for name, buffer in root.named_buffers() if not isinstance(buffer, DTensor)}
    states: dict[str, torch.Tensor] = {**{name: p for name, _, p in listed}, **buffers}
    _refuse_different_models(states, mesh)
    mine = torch.tensor([not t.is_meta for t in states.values()], dtype=torch.uint8, device=wire_of(mesh))
    firsts = mine.clone()
    broadcast_from_first_rank(firsts, mesh)
    _refuse_missing(list(states), mine > firsts, mesh)
    has_value = dict(zip(states, firsts.tolist(), strict=True))
    first = is_first(mesh)
    # Now, since full parameters are freed when they are sharded.
    values = {place: _own_value(p) for name, place, p in listed if has_value[name]}
    held = {place: value if first else None for place, value in values.items()}
    return FirstRankValues(mesh, held, [name for name in buffers if has_value[name]])


def _own_value(parameter: nn.Parameter) -> torch.Tensor:
    """What is sharded of a parameter: of a DTensor, this rank's part."""
    return (local_tensor(parameter) if isinstance(parameter, DTensor) else parameter).detach()


def _refuse_different_models(states: dict[str, torch.Tensor], mesh: DeviceMesh) -> None:
    text = repr([(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in states.items()])
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    # One reduction finds the largest and the smallest digest.
    bounds = torch.tensor([digest, -digest], device=wire_of(mesh))
    all_reduce_max(bounds, mesh)
    if bounds[0].item() != -bounds[1].item():
        raise RankMismatchError(
            "ranks hold parameters or buffers of different names, shapes, dtypes or requires_grad",
            where=_OPTION,
            instead="the same model on every rank",
        )


def _refuse_missing(names: list[str], missing: torch.Tensor, mesh: DeviceMesh) -> None:
    missing = missing.to(torch.int64)
    all_reduce_max(missing, mesh)
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
