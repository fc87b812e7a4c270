"""The full parameters of one parameter group, while they stay gathered from one call to the next.

Which units' parameters stay gathered between calls: by hand, or between the microbatches of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile._torch.distributed import collectives
from fsdp_compile.layout.messages import EagerBuilder, full_parameter
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops import quantize
from fsdp_compile.runtime import pending, update_in_backward
from fsdp_compile.runtime.group_state import PendingAllGather, UnshardedParams
from fsdp_compile.runtime.units import FSDPParamGroup, FSDPUnit
from fsdp_compile.runtime.unshard_args import refresh_unshard_args

_EAGER = EagerBuilder()
_steps = [0]
"""How often any optimizer stepped: torch's foreach kernels write DTensors without telling their version counters."""


def _count_step(*_: Any) -> None:
    _steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def version_of(flat: FSDPParamGroup) -> tuple[int, ...]:
    """Counters that change when a parameter is written to: by an optimizer, or in place by any operator."""
    return (_steps[0], flat.flat_param._version, *(slot.parameter._version for slot in flat.slots))


def start(flat: FSDPParamGroup) -> PendingAllGather:
    """Starts one grouped all-gather of all slots for each dtype that is sent."""
    before = version_of(flat)
    buffer = flat.flat_param.detach()
    sent = [_messages(buffer[s.spec.offset : s.spec.offset + s.spec.extent], s.spec) for s in flat.slots]
    arriving = iter(_gathered([message for messages in sent for message in messages], flat.slots[0].spec))
    return PendingAllGather(tuple(tuple(next(arriving) for _ in messages) for messages in sent), before)


def _messages(piece: torch.Tensor, spec: UnshardSpec) -> list[torch.Tensor]:
    piece = piece.to(spec.compute or piece.device)
    if spec.gather_dtype is None:
        return [piece.to(spec.param_dtype)]
    scales = quantize.block_scales(piece, spec.gather_dtype)
    return [quantize.quantize(piece, scales, spec.gather_dtype), scales]


def _gathered(messages: list[torch.Tensor], spec: UnshardSpec) -> list[torch.Tensor]:
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


def finish(flat: FSDPParamGroup, running: PendingAllGather) -> UnshardedParams:
    """Waits for the all-gathers, and makes full parameters of their messages."""
    values = {}
    for slot, messages in zip(flat.slots, running.messages, strict=True):
        spec = slot.spec
        done, *scales = [collectives.wait_tensor(m) if spec.size > 1 else m for m in messages]
        if spec.gather_dtype is not None:
            done = quantize.dequantize(done, *scales, spec.gather_dtype, spec.size, spec.param_dtype)
        values[spec.offset] = full_parameter(_EAGER, done, spec, start=0, span=spec.extent)
    return UnshardedParams(values, running.version)


class UnshardHandle:
    """All-gathers that `unshard(async_op=True)` started."""

    def __init__(self, flats: Iterable[FSDPParamGroup]) -> None:
        self._flats = list(flats)

    def wait(self) -> None:
        """Waits until the parameters are there; the next forward takes them. Waiting again does nothing."""
        for flat in self._flats:
            _finish_all_gather(flat)


def unshard(units: Iterable[FSDPUnit]) -> UnshardHandle:
    """Starts to gather the parameters of units, those that are not there already.

    Returns:
        A handle; the next forward of the model waits by itself.
    """
    flats = [flat for unit in units if unit.policy.size > 1 for flat in unit.flats]
    for flat in flats:
        if flat.all_gather is None and not _is_current(flat):
            flat.all_gather = start(flat)
            pending.mark_pending(flat)
    return UnshardHandle(flats)


def _finish_all_gather(flat: FSDPParamGroup) -> None:
    if flat.all_gather is not None:
        flat.unsharded_params, flat.all_gather = finish(flat, flat.all_gather), None
        refresh_unshard_args(flat)


def reshard(units: Iterable[FSDPUnit]) -> None:
    """Frees the gathered parameters of units."""
    for unit in units:
        for flat in unit.flats:
            if flat.all_gather is not None:
                _finish_all_gather(flat)  # memory may not be freed while it is written
            if flat.unsharded_params is not None:
                flat.unsharded_params = None
                refresh_unshard_args(flat)


def before_forward(units: Iterable[FSDPUnit]) -> None:
    """Sees to it that what is kept of units is what their parameters are now, and gathers what is to be kept."""
    is_repeated = backward_in_progress() != -1  # by activation checkpointing; nobody has written since
    is_trained = torch.is_grad_enabled()
    for flat in pending.pending_in(units):
        if flat.all_gather is not None:
            _finish_all_gather(flat)
        if is_repeated:
            continue
        update_in_backward.begin(flat)
        keeps = is_trained and flat.unit.stays_unsharded and flat.unit.policy.size > 1
        if keeps if flat.unsharded_params is None else is_outdated(flat):
            unshard_again(flat)


def unshard_again(flat: FSDPParamGroup) -> None:
    """Gathers all parameters of a parameter group, and keeps them."""
    flat.unsharded_params = finish(flat, start(flat))
    refresh_unshard_args(flat)


def is_outdated(flat: FSDPParamGroup) -> bool:
    """Whether what is kept of a parameter group has been overtaken by its parameters."""
    return flat.unsharded_params is not None and not _is_current(flat)


def after_backward(flats: Iterable[FSDPParamGroup]) -> None:
    """Frees what need not be kept any longer of some parameter groups."""
    held = [flat for flat in flats if flat.unsharded_params is not None or flat.all_gather is not None]
    reshard(unit for unit in dict.fromkeys(flat.unit for flat in held) if not unit.stays_unsharded)


def _is_current(flat: FSDPParamGroup) -> bool:
    return flat.unsharded_params is not None and flat.unsharded_params.version == version_of(flat)
