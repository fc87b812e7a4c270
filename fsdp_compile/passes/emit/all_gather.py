"""Records how one parameter, or a piece of a flat parameter, is gathered.

    %w = fsdp_compile.unshard(%flat, spec)                 ->  slice, all_gather, wait, view
    %part = fsdp_compile.shard_post_forward(%w, spec)      ->  post_forward_part of the gathered message
    %w = fsdp_compile.unshard_post_forward(%part, spec)    ->  all_gather over fewer ranks, wait, view

    as it is      slice, cast                      ->  one message   ->  the message itself
    quantized     slice, block_scales, quantize    ->  two messages  ->  dequantize

A slice of a shard on the host is copied to the device first (`host_copy.py`). A post-forward shard that is not saved is
not made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import getitem

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role
from fsdp_compile.layout.messages import cast, full_parameter, narrow
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops.post_forward import OWN_PART, UNSHARD_POST_FORWARD
from fsdp_compile.ops.quantize import BLOCK_SCALES, DEQUANTIZE, QUANTIZE
from fsdp_compile.passes.emit.host_copy import copy_in


def messages_of(b: GraphBuilder, flat: fx.Node, begin: int, span: int, spec: UnshardSpec) -> list[fx.Node]:
    """Records the messages of `flat[begin : begin + span]`, before the all-gather.

    `spec` is that of the first slot there; all slots of a message have its dtypes.
    """
    shard = copy_in(b, narrow(b, flat, 0, begin, begin + span), spec)
    if not spec.gather_format:
        return [cast(b, shard, spec.param_dtype)]
    scales = b.call(BLOCK_SCALES, shard, spec.gather_format)
    return [b.call(QUANTIZE, shard, scales, spec.gather_format), scales]


def received(b: GraphBuilder, arrived: Sequence[fx.Node], spec: UnshardSpec) -> fx.Node:
    """Records how the gathered messages of a piece become `[size * span]` elements in the dtype that readers get."""
    if not spec.gather_format:
        return arrived[0]
    with b.as_role(Role.COPY_OUT):
        return b.call(DEQUANTIZE, *arrived, spec.gather_format, spec.size, spec.param_dtype)


aten = torch.ops.aten


def message_of(b: GraphBuilder, marker: fx.Node, spec: UnshardSpec) -> fx.Node:
    """Records the gather for a marker; returns `[size * extent]` elements in the dtype that readers get."""
    source: fx.Node = marker.args[0]  # type: ignore[assignment]
    if marker.target is UNSHARD_POST_FORWARD:
        return _gather(b, [source], spec.post_forward_size, spec.post_forward_group)[0]
    messages = messages_of(b, source, spec.offset, spec.extent, spec)
    arrived = _gather(b, messages, spec.size, spec.group) if spec.size > 1 else messages
    return received(b, arrived, spec)


def _gather(b: GraphBuilder, messages: list[fx.Node], size: int, group: str) -> list[fx.Node]:
    """Records one all-gather, grouped if there are several messages, and the waits."""
    with b.as_role(Role.GATHER):
        if len(messages) == 1:
            started = [b.call(collectives.all_gather_into_tensor.default, messages[0], size, group)]
        else:
            grouped = b.call(collectives.all_gather_into_tensor_coalesced.default, messages, size, group)
            with b.as_role(Role.GATHER_ITEM):
                started = [b.call(getitem, grouped, index) for index in range(len(messages))]
    with b.as_role(Role.GATHER_WAIT):
        return [b.call(collectives.wait_tensor.default, item) for item in started]


def full_node(b: GraphBuilder, message: fx.Node, spec: UnshardSpec, *, start: int, span: int) -> fx.Node:
    """Records the steps from a gathered message to a full parameter; the last one has role FULL."""
    with b.as_role(Role.COPY_OUT):
        full = full_parameter(b, message, spec, start=start, span=span)
        if full is message:  # a node of its own, so that passes can tell readers from the wait
            full = b.call(aten.view.default, message, list(spec.shape))
    full.meta["fsdp"] = dataclasses.replace(b.record, role=Role.FULL)
    return full


def view_of_unsharded(b: GraphBuilder, kept: fx.Node, spec: UnshardSpec) -> fx.Node:
    """Records a read of a full parameter that is still unsharded since an earlier call."""
    with b.as_role(Role.FULL):
        return b.call(aten.view.default, kept, list(spec.shape))


def shard_post_forward(b: GraphBuilder, marker: fx.Node, message: fx.Node, full: fx.Node) -> None:
    """Copies this rank's post-forward shard out of a message for `marker`."""
    for again in [user for user in marker.users if user.target is UNSHARD_POST_FORWARD]:
        # In forward the message's own parameter is there: nothing needs to be gathered again.
        again.replace_all_uses_with(full)
        again.graph.erase_node(again)
    if marker.users:
        with marker.graph.inserting_before(marker):
            marker.replace_all_uses_with(post_forward_part(b, message))
    marker.graph.erase_node(marker)


def post_forward_part(b: GraphBuilder, message: fx.Node) -> fx.Node:
    """Records the copy of the part of a gathered message that this rank saves for backward."""
    spec = b.record.specs[0]
    with b.as_role(Role.POST_FORWARD_SHARD):
        return b.call(OWN_PART, message, spec.post_forward_size, spec.post_forward_group)
