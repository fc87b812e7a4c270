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


def version_of(group: FSDPParamGroup) -> tuple[int, ...]:
    """Counters that change when a parameter is written to: by an optimizer, or in place by any operator."""
    return (_steps[0], group.flat_param._version, *(param.parameter._version for param in group.params))


def start(group: FSDPParamGroup) -> PendingAllGather:
    """Starts one grouped all-gather of all parameters for each dtype that is sent."""
    before = version_of(group)
    buffer = group.flat_param.detach()
    sent = [_messages(buffer[s.spec.offset : s.spec.offset + s.spec.extent], s.spec) for s in group.params]
    arriving = iter(_gathered([message for messages in sent for message in messages], group.params[0].spec))
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
        outputs = collectives.all_gather_into_tensor_coalesced(same, spec.size, spec.group)
        arriving.update(zip(places, outputs, strict=True))
    return [arriving[place] for place in range(len(messages))]


def finish(group: FSDPParamGroup, running: PendingAllGather) -> UnshardedParams:
    """Waits for the all-gathers, and makes full parameters of their messages."""
    values = {}
    for param, messages in zip(group.params, running.messages, strict=True):
        spec = param.spec
        done, *scales = [collectives.wait_tensor(m) if spec.size > 1 else m for m in messages]
        if spec.gather_dtype is not None:
            done = quantize.dequantize(done, *scales, spec.gather_dtype, spec.size, spec.param_dtype)
        values[spec.offset] = full_parameter(_EAGER, done, spec, start=0, span=spec.extent)
    return UnshardedParams(values, running.version)


class UnshardHandle:
    """All-gathers that `unshard(async_op=True)` started."""

    def __init__(self, groups: Iterable[FSDPParamGroup]) -> None:
        self._flats = list(groups)

    def wait(self) -> None:
        """Waits until the parameters are there; the next forward takes them. Waiting again does nothing."""
        for group in self._flats:
            _finish_all_gather(group)


def unshard(units: Iterable[FSDPUnit]) -> UnshardHandle:
    """Starts to gather the parameters of units, those that are not there already.

    Returns:
        A handle; the next forward of the model waits by itself.
    """
    groups = [group for unit in units if unit.policy.size > 1 for group in unit.param_groups]
    for group in groups:
        if group.all_gather is None and not _is_current(group):
            group.all_gather = start(group)
            pending.mark_pending(group)
    return UnshardHandle(groups)


def _finish_all_gather(group: FSDPParamGroup) -> None:
    if group.all_gather is not None:
        group.unsharded_params, group.all_gather = finish(group, group.all_gather), None
        refresh_unshard_args(group)


def reshard(units: Iterable[FSDPUnit]) -> None:
    """Frees the gathered parameters of units."""
    for unit in units:
        for group in unit.param_groups:
            if group.all_gather is not None:
                _finish_all_gather(group)  # memory may not be freed while it is written
            if group.unsharded_params is not None:
                group.unsharded_params = None
                refresh_unshard_args(group)


def before_forward(units: Iterable[FSDPUnit]) -> None:
    """Sees to it that what is kept of units is what their parameters are now, and gathers what is to be kept."""
    is_repeated = backward_in_progress() != -1  # by activation checkpointing; nobody has written since
    is_trained = torch.is_grad_enabled()
    for group in pending.pending_in(units):
        if group.all_gather is not None:
            _finish_all_gather(group)
        if is_repeated:
            continue
        update_in_backward.begin(group)
        keeps = is_trained and group.unit.stays_unsharded and group.unit.policy.size > 1
        if keeps if group.unsharded_params is None else is_outdated(group):
            unshard_again(group)


def unshard_again(group: FSDPParamGroup) -> None:
    """Gathers all parameters of a parameter group, and keeps them."""
    group.unsharded_params = finish(group, start(group))
    refresh_unshard_args(group)


def is_outdated(group: FSDPParamGroup) -> bool:
    """Whether what is kept of a parameter group has been overtaken by its parameters."""
    return group.unsharded_params is not None and not _is_current(group)


def after_backward(groups: Iterable[FSDPParamGroup]) -> None:
    """Frees what need not be kept any longer of some parameter groups."""
    held = [group for group in groups if group.unsharded_params is not None or group.all_gather is not None]
    reshard(unit for unit in dict.fromkeys(group.unit for group in held) if not unit.stays_unsharded)


def _is_current(group: FSDPParamGroup) -> bool:
    return group.unsharded_params is not None and group.unsharded_params.version == version_of(group)
