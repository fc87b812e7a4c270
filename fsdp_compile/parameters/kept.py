"""The full parameters of one flat shard, while they stay gathered from one call to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_compile._torch import collectives
from fsdp_compile.parameters import assemble
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.spec import ReadSpec

_EAGER = assemble.EagerBuilder()
_steps = [0]
"""How often any optimizer stepped: torch's foreach kernels write DTensors without telling their version counters."""


def _count_step(*_: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


@dataclasses.dataclass(frozen=True)
class KeptParameters:
    """Full parameters, and the moment at which they were those of the flat shard.

    Attributes:
        values: The full parameter of each slot, by offset.
        stamp: Counters that change with the parameters.
    """

    values: Mapping[int, torch.Tensor]
    stamp: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RunningGather:
    """An all-gather of all slots of a flat shard that was started and not yet waited for."""

    messages: tuple[torch.Tensor, ...]
    stamp: tuple[int, ...]


def stamp(flat: FlatShard) -> tuple[int, ...]:
    """Counters that change when a parameter is written to: by an optimizer, or in place by any operator."""
    return (_steps[0], flat.leaf._version, *(slot.parameter._version for slot in flat.slots))


def start(flat: FlatShard) -> RunningGather:
    """Starts one grouped all-gather of all slots."""
    before = stamp(flat)
    buffer = flat.leaf.detach()
    spec = flat.slots[0].spec
    pieces = [_piece(buffer, slot.spec) for slot in flat.slots]
    if spec.size > 1:
        pieces = collectives.all_gather_into_tensor_coalesced(pieces, spec.size, spec.group)
    else:
        pieces = [piece.clone() for piece in pieces]
    return RunningGather(tuple(pieces), before)


def _piece(buffer: torch.Tensor, spec: ReadSpec) -> torch.Tensor:
    piece = buffer[spec.offset : spec.offset + spec.extent]
    return piece.to(spec.compute or piece.device).to(spec.param_dtype)


def finish(flat: FlatShard, running: RunningGather) -> KeptParameters:
    """Waits for an all-gather, and makes full parameters of its messages."""
    values = {}
    for slot, message in zip(flat.slots, running.messages, strict=True):
        done = collectives.wait_tensor(message) if slot.spec.size > 1 else message
        values[slot.spec.offset] = assemble.full_parameter(_EAGER, done, slot.spec, start=0, span=slot.spec.extent)
    return KeptParameters(values, running.stamp)
