"""The nodes that passes insert for one parameter, or for a piece of a flat parameter.

Host copies, for shards on the host (CPU offload):

    slice(%flat), cast, all_gather   ->   slice(%flat), start_copy to the device, wait_copy, cast, all_gather
    join(...) is the flat gradient   ->   join(...), start_copy to the host, wait_copy is the flat gradient

The flat parameter itself is copied, and cast on the device: it is pinned, so that the copy overlaps computation, while
a narrow copy made on the host would be pageable and cost the launching thread a pass over memory. Gradients are joined
on the device, so that one copy per flat parameter goes back. Waiting for it blocks the stream, not the host, so nothing
in the graph reads it: the host waits once, at the end of backward (`lower/compiled_step.py`). Here each wait stands
right behind its start; `schedule_prefetch.py`, `schedule_reduce.py` and `schedule_auto.py` move them apart.

All-gathers; a post-forward shard that is not saved is not made:

    %w = fsdp_compile.unshard(%flat, spec)                 ->  slice, all_gather, wait, view
    %part = fsdp_compile.shard_post_forward(%w, spec)      ->  post_forward_part of the gathered message
    %w = fsdp_compile.unshard_post_forward(%part, spec)    ->  all_gather over fewer ranks, wait, view

    as it is      slice, cast                      ->  one message   ->  the message itself
    quantized     slice, block_scales, quantize    ->  two messages  ->  dequantize

The collectives that average a gradient, one after the other:

    shard group of F > 1 ranks     reduce-scatter: each rank gets its 1/F, averaged over the group
    R > 1 replicas                 all-reduce of that, averaged over the replicas

A communication hook of the user's takes the place of the first one; waiting for it does nothing, since it has
completed. Full sharding has the first stage, replicas without sharding the second, hybrid sharding both, one rank none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from operator import getitem

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role
from fsdp_compile.layout.messages import cast, full_parameter, narrow
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, scaling
from fsdp_compile.ops import comm_hook
from fsdp_compile.ops.host_copy import START_COPY, WAIT_COPY
from fsdp_compile.ops.post_forward import OWN_PART, UNSHARD_POST_FORWARD
from fsdp_compile.ops.quantize import BLOCK_SCALES, DEQUANTIZE, QUANTIZE

aten = torch.ops.aten


def copy_out(b: GraphBuilder, gradient: fx.Node) -> fx.Node:
    """Records the copy of a flat gradient to the host if it belongs there; else `gradient` itself."""
    spec = b.record.specs[0]
    # Accumulated gradients that are not fully reduced stay on the device.
    if not spec.compute or spec.grad_placement is not GradPlacement.REDUCED:
        return gradient
    with b.as_role(Role.OFFLOAD_OUT):
        copied = b.call(START_COPY, gradient, "cpu")
    with b.as_role(Role.OFFLOAD_OUT_WAIT):
        waited = b.call(WAIT_COPY, copied, gradient)
    return b.call(aten.view.default, waited, list(b.value(waited).shape))


def messages_of(b: GraphBuilder, flat: fx.Node, begin: int, span: int, spec: UnshardSpec) -> list[fx.Node]:
    """Records the messages of `flat[begin : begin + span]`, before the all-gather.

    `spec` is that of the first slot there; all slots of a message have its dtypes.
    """
    shard = narrow(b, flat, 0, begin, begin + span)
    if spec.compute:
        with b.as_role(Role.OFFLOAD_IN):
            copied = b.call(START_COPY, shard, spec.compute)
        with b.as_role(Role.OFFLOAD_IN_WAIT):
            shard = b.call(WAIT_COPY, copied)  # nothing writes to the flat parameter while the graph runs
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


ReduceStage = tuple[tuple[Role, Role, Role], OpOverload, OpOverload, tuple[object, ...]]
"""One collective of a reduction: roles of its start, of one message while it runs and of its wait; the operators for
one message and for a list of them; what these take after the messages."""
_SCATTER = (Role.REDUCE, Role.REDUCE_ITEM, Role.REDUCE_WAIT)
_REPLICATE = (Role.REPLICATE, Role.REPLICATE_ITEM, Role.REPLICATE_WAIT)
STARTS = (Role.REDUCE, Role.REPLICATE)
"""Roles of the nodes that start a stage."""
ON_THE_WAY = (*_SCATTER, Role.ADD_PARTIAL, *_REPLICATE)
"""Roles of the nodes between a gradient's message and its average."""


def stages(spec: UnshardSpec) -> Iterator[ReduceStage]:
    """The stages of a parameter's reduction, in order."""
    operation, c = scaling(spec).operation, collectives
    if spec.size > 1 and spec.grad_placement is not GradPlacement.UNREDUCED:
        if spec.hook:
            operators = comm_hook.HOOK_SCATTER, comm_hook.HOOK_SCATTER_COALESCED
            yield _SCATTER, *operators, (spec.size, spec.hook)
        else:
            operators = c.reduce_scatter_tensor.default, c.reduce_scatter_tensor_coalesced.default
            yield _SCATTER, *operators, (operation, spec.size, spec.scatter_group)
    if spec.hook and spec.size == 1:
        if spec.grad_placement is GradPlacement.REDUCED:
            operators = comm_hook.HOOK_REDUCE, comm_hook.HOOK_REDUCE_COALESCED
            yield _REPLICATE, *operators, (spec.hook,)
    # Without shards, a hook has taken the place of this all-reduce.
    elif spec.replicas > 1 and spec.grad_placement is GradPlacement.REDUCED:
        operators = c.all_reduce.default, c.all_reduce_coalesced.default
        yield _REPLICATE, *operators, (operation, spec.replicate_group)


def scale_after(b: GraphBuilder, shard: fx.Node, spec: UnshardSpec) -> fx.Node:
    """Records the division of a sum over all ranks, if there is one."""
    factor = scaling(spec).after
    if factor is None or spec.grad_placement is not GradPlacement.REDUCED:
        return shard
    with b.as_role(Role.SHARD_GRADIENT):
        return b.call(aten.div.Tensor, shard, factor)


def add_partial(b: GraphBuilder, partial: fx.Node | None, begin: int, shard: fx.Node) -> fx.Node:
    """Records the sum of a reduced message and of the accumulated gradients of its slots, from element `begin` on.

    `shard` itself if the flat parameter has no such gradients.
    """
    if partial is None:
        return shard
    with b.as_role(Role.ADD_PARTIAL):
        held = narrow(b, partial, 0, begin, begin + b.value(shard).shape[0])
        # Where it travels in fewer bits than it accumulates in, the sum is in more than the message.
        return cast(b, b.call(aten.add.Tensor, held, shard), b.value(shard).dtype)


def reduce_one(
    b: GraphBuilder, message: fx.Node, spec: UnshardSpec, add_partials: Callable[[fx.Node], fx.Node]
) -> fx.Node:
    """Records the reduction of one message, `[size * extent]`; the result is this rank's `[extent]`.

    `add_partials` adds the accumulated gradients that wait for their sum over replicas, before that.
    """
    for (start, _, wait), operator, _, arguments in stages(spec):
        if start is Role.REPLICATE:
            message = add_partials(message)
        with b.as_role(start):
            message = b.call(operator, message, *arguments)
        with b.as_role(wait):
            message = b.call(collectives.wait_tensor.default, message)
    return scale_after(b, message, spec)
