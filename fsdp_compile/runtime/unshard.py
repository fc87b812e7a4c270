"""Unsharding whole parameter groups outside of graphs: on request, or to stay gathered between microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch.distributed import fsdp

from fsdp_compile._torch.autograd import backward_in_progress, outside_of_transforms
from fsdp_compile._torch.distributed import collectives
from fsdp_compile.comm.gather_extension import StartedGather
from fsdp_compile.layout.messages import EagerBuilder, full_parameter
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops import quantize
from fsdp_compile.runtime import read_order, update_in_backward
from fsdp_compile.runtime.group_state import PendingAllGather, UnshardedParams
from fsdp_compile.runtime.read_order import Done
from fsdp_compile.runtime.units import FSDPParam, FSDPParamGroup, FSDPUnit, ModelState
from fsdp_compile.runtime.unshard_args import refresh_unshard_args

_EAGER = EagerBuilder()


class UnshardHandle(fsdp.UnshardHandle):
    """All-gathers that `unshard(async_op=True)` started."""

    def __init__(self, groups: Iterable[FSDPParamGroup]) -> None:
        self._groups = list(groups)

    def wait(self) -> None:
        """Waits for the all-gathers, so that the next forward uses their results. Waiting again does nothing."""
        for group in self._groups:
            _finish_all_gather(group)


def unshard(units: Iterable[FSDPUnit]) -> UnshardHandle:
    """Starts to gather the parameters of units that are not gathered already; the next forward waits by itself."""
    groups = [group for unit in units if unit.policy.size > 1 for group in unit.param_groups]
    for group in groups:
        group.unit.model.wait_for_optimizer()
        if group.unsharded.all_gather is None and not _is_current(group):
            _start_all_gather(group)
            group.unit.model.mark_pending(group)
    return UnshardHandle(groups)


def reshard(units: Iterable[FSDPUnit]) -> None:
    """Frees the unsharded parameters of units."""
    free(group for unit in units for group in unit.param_groups)


def free(groups: Iterable[FSDPParamGroup]) -> None:
    """Frees the unsharded parameters of parameter groups."""
    for group in groups:
        _finish_all_gather(group)  # memory may not be freed while it is written
        is_read = group.unsharded.params is not None
        group.unsharded.free()
        if is_read:
            refresh_unshard_args(group)


def pre_forward(units: Sequence[FSDPUnit], models: Sequence[ModelState]) -> None:
    """Waits for running all-gathers, and gathers again what is outdated or is to stay unsharded.

    Args:
        units: The units that the forward reads from.
        models: The models of these units.
    """
    is_repeated = backward_in_progress() != -1  # by activation checkpointing: nothing has been written since
    is_trained = torch.is_grad_enabled()
    for model in models:
        model.wait_for_optimizer()
    for group in itertools.chain.from_iterable(model.pending_in(units) for model in models):
        _finish_all_gather(group)
        if is_repeated:
            continue
        update_in_backward.begin(group)
        stays = is_trained and _is_gathered_to_stay(group.unit)
        if stays or is_outdated(group):
            unshard_again(group)


def unshard_again(group: FSDPParamGroup) -> None:
    """Gathers all parameters of a group unless their unsharded values are current."""
    _finish_all_gather(group)
    if not _is_current(group):
        _start_all_gather(group)
        _finish_all_gather(group)


def follow_writes(group: FSDPParamGroup, param: FSDPParam) -> None:
    """Gathers a group with unsharded values again if the running forward has written to one of its parameters."""
    held = group.unsharded.params
    if held is not None:
        flat, *each = held.version
        if version_of_param(group, param) != (flat, each[group.params.index(param)]):
            unshard_again(group)


def is_outdated(group: FSDPParamGroup) -> bool:
    """Whether parameters of a group were written to since their all-gather started."""
    return not group.unsharded.is_sharded and not _is_current(group)


def _is_gathered_to_stay(unit: FSDPUnit) -> bool:
    return unit.stays_unsharded and unit.policy.size > 1


def post_backward(groups: Iterable[FSDPParamGroup]) -> None:
    """Frees the unsharded parameters of some groups, but for units that are to stay unsharded."""
    units = dict.fromkeys(group.unit for group in groups if not group.unsharded.is_sharded)
    reshard(unit for unit in units if not unit.stays_unsharded)


def _start_all_gather(group: FSDPParamGroup) -> None:
    read_order.note(group, Done.UNSHARDED)
    # Values that are kept outlive an evaluation in inference mode, and training graphs save them.
    with outside_of_transforms(), profiled(Range.ALL_GATHER, [group.unit.name]):
        group.unsharded.start(_start(group))


def _finish_all_gather(group: FSDPParamGroup) -> None:
    running = group.unsharded.all_gather
    if running is not None:
        with outside_of_transforms(), profiled(Range.ALL_GATHER_COPY_OUT, [group.unit.name]):
            group.unsharded.finish(_finished(group, running))
        refresh_unshard_args(group)


def _is_current(group: FSDPParamGroup) -> bool:
    return group.unsharded.params is not None and group.unsharded.params.version == version_of(group)


def version_of(group: FSDPParamGroup) -> tuple[int, ...]:
    """Counters that change when an optimizer, or any operator in place, writes to a parameter."""
    return (group.flat_param._version, *(param.parameter._version for param in group.params))


def version_of_param(group: FSDPParamGroup, param: FSDPParam) -> tuple[int, ...]:
    """The same for one parameter."""
    return (group.flat_param._version, param.parameter._version)


def _start(group: FSDPParamGroup) -> PendingAllGather:
    """Starts one grouped all-gather of all parameters for each dtype that is sent."""
    # Before the copies into messages: a write that follows them makes the result outdated.
    before = version_of(group)
    if group.is_extended:
        return PendingAllGather((), before, tuple(_start_extended(param) for param in group.params))
    buffer = group.flat_param.detach()
    sent = [_messages(buffer[s.spec.offset : s.spec.offset + s.spec.extent], s.spec) for s in group.params]
    outputs = iter(_gathered([message for messages in sent for message in messages], group.params[0].spec))
    return PendingAllGather(tuple(tuple(next(outputs) for _ in messages) for messages in sent), before)


def _start_extended(param: FSDPParam) -> StartedGather:
    assert param.extension is not None
    return param.extension.start(param.sharded_view, param.sharded_view, param.spec.text)


def _messages(piece: torch.Tensor, spec: UnshardSpec) -> list[torch.Tensor]:
    piece = piece.to(spec.compute or piece.device)
    if not spec.gather_format:
        return [piece.to(spec.param_dtype)]
    scales = quantize.block_scales(piece, spec.gather_format)
    return [quantize.quantize(piece, scales, spec.gather_format), scales]


def _gathered(messages: list[torch.Tensor], spec: UnshardSpec) -> list[torch.Tensor]:
    if spec.size == 1:
        # In memory of their own, as all-gathers return them.
        return [message.clone() for message in messages]
    gathered: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(message.dtype for message in messages):
        places = [place for place, message in enumerate(messages) if message.dtype == dtype]
        same = [messages[place] for place in places]
        outputs = collectives.all_gather_into_tensor_coalesced(same, spec.size, spec.group)
        gathered.update(zip(places, outputs, strict=True))
    return [gathered[place] for place in range(len(messages))]


def _finished(group: FSDPParamGroup, running: PendingAllGather) -> UnshardedParams:
    """Waits for the all-gathers, and makes unsharded parameters of their messages."""
    values = {}
    for param, started in zip(group.params, running.extended, strict=group.is_extended):
        assert param.extension is not None
        shard, dtype = param.sharded_view, param.spec.param_dtype
        values[param.spec.offset] = param.extension.finish(shard, shard, started, dtype)
    for param, messages in zip(group.params, running.messages, strict=not group.is_extended):
        spec = param.spec
        done, *scales = [collectives.wait_tensor(m) if spec.size > 1 else m for m in messages]
        if spec.gather_format:
            done = quantize.dequantize(done, *scales, spec.gather_format, spec.size, spec.param_dtype)
        values[spec.offset] = full_parameter(_EAGER, done, spec, start=0, span=spec.extent)
    return UnshardedParams(values, running.version)
