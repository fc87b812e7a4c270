"""The full parameters of one flat shard, while they stay gathered from one call to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_compile._torch import collectives
from fsdp_compile.parameters import assemble, quantize
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
    """All-gathers of all slots of a flat shard that were started and not yet waited for.

    Attributes:
        messages: For each slot, its message; of a quantized parameter its elements, then its scales.
        stamp: Counters that change with the parameters.
    """

    messages: tuple[tuple[torch.Tensor, ...], ...]
    stamp: tuple[int, ...]


def stamp(flat: FlatShard) -> tuple[int, ...]:
    """Counters that change when a parameter is written to: by an optimizer, or in place by any operator."""
    return (_steps[0], flat.leaf._version, *(slot.parameter._version for slot in flat.slots))


def start(flat: FlatShard) -> RunningGather:
    """Starts one grouped all-gather of all slots for each dtype that is sent."""
    before = stamp(flat)
    buffer = flat.leaf.detach()
    sent = [_messages(buffer[s.spec.offset : s.spec.offset + s.spec.extent], s.spec) for s in flat.slots]
    arriving = iter(_gathered([message for messages in sent for message in messages], flat.slots[0].spec))
    return RunningGather(tuple(tuple(next(arriving) for _ in messages) for messages in sent), before)


def _messages(piece: torch.Tensor, spec: ReadSpec) -> list[torch.Tensor]:
    piece = piece.to(spec.compute or piece.device)
    if spec.gather_dtype is None:
        return [piece.to(spec.param_dtype)]
    scales = quantize.block_scales(piece, spec.gather_dtype)
    return [quantize.quantize(piece, scales, spec.gather_dtype), scales]


def _gathered(messages: list[torch.Tensor], spec: ReadSpec) -> list[torch.Tensor]:
    """What will arrive for each message."""
    if spec.size == 1:
        return [message.clone() for message in messages]
    arriving: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(message.dtype for message in messages):
        places = [place for place, message in enumerate(messages) if message.dtype == dtype]
        same = [messages[place] for place in places]
        group = collectives.all_gather_into_tensor_coalesced(same, spec.size, spec.group)
        arriving.update(zip(places, group, strict=True))
    return [arriving[place] for place in range(len(messages))]


def finish(flat: FlatShard, running: RunningGather) -> KeptParameters:
    """Waits for the all-gathers, and makes full parameters of their messages."""
    values = {}
    for slot, messages in zip(flat.slots, running.messages, strict=True):
        spec = slot.spec
        done, *scales = [collectives.wait_tensor(m) if spec.size > 1 else m for m in messages]
        if spec.gather_dtype is not None:
            done = quantize.dequantize(done, *scales, spec.gather_dtype, spec.size, spec.param_dtype)
        values[spec.offset] = assemble.full_parameter(_EAGER, done, spec, start=0, span=spec.extent)
    return KeptParameters(values, running.stamp)
