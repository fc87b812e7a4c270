"""The collectives that average a gradient, one after the other.

    shard group of F > 1 ranks     reduce-scatter: each rank gets its 1/F, averaged over the group
    R > 1 replicas                 all-reduce of that, averaged over the replicas

A communication hook of the user's takes the place of the first one; waiting for it does nothing, since it has
completed. Full sharding has the first stage, replicas without sharding the second, hybrid sharding both, one rank none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.tensors import OpOverload
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role
from fsdp_compile.layout.averaging import scaling
from fsdp_compile.layout.messages import cast, narrow
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec
from fsdp_compile.ops import comm_hook

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class ReduceStage:
    """One collective of a reduction: roles of its nodes, and its operators.

    Attributes:
        item: Role of one message of a grouped one that is still running.
        single: The operator for one message.
        grouped: The operator for a list of messages.
        arguments: What the operators take after the message or messages.
    """

    start: Role
    item: Role
    wait: Role
    single: OpOverload
    grouped: OpOverload
    arguments: Callable[[UnshardSpec], tuple[object, ...]]


SCATTER = ReduceStage(
    Role.REDUCE,
    Role.REDUCE_ITEM,
    Role.REDUCE_WAIT,
    collectives.reduce_scatter_tensor.default,
    collectives.reduce_scatter_tensor_coalesced.default,
    lambda spec: (scaling(spec).operation, spec.size, spec.scatter_group),
)
REPLICATE = ReduceStage(
    Role.REPLICATE,
    Role.REPLICATE_ITEM,
    Role.REPLICATE_WAIT,
    collectives.all_reduce.default,
    collectives.all_reduce_coalesced.default,
    lambda spec: (scaling(spec).operation, spec.replicate_group),
)
HOOK_SCATTER = dataclasses.replace(
    SCATTER,
    single=comm_hook.HOOK_SCATTER,
    grouped=comm_hook.HOOK_SCATTER_COALESCED,
    arguments=lambda spec: (spec.size, spec.hook),
)
HOOK_REDUCE = dataclasses.replace(
    REPLICATE,
    single=comm_hook.HOOK_REDUCE,
    grouped=comm_hook.HOOK_REDUCE_COALESCED,
    arguments=lambda spec: (spec.hook,),
)
STARTS = (Role.REDUCE, Role.REPLICATE)
"""Roles of the nodes that start a stage."""
ON_THE_WAY = (
    Role.REDUCE,
    Role.REDUCE_ITEM,
    Role.REDUCE_WAIT,
    Role.ADD_PARTIAL,
    Role.REPLICATE,
    Role.REPLICATE_ITEM,
    Role.REPLICATE_WAIT,
)
"""Roles of the nodes between a gradient's message and its average."""


def stages(spec: UnshardSpec) -> Iterator[ReduceStage]:
    """The stages of a parameter's reduction, in order."""
    if spec.size > 1 and spec.grad_placement is not GradPlacement.UNREDUCED:
        yield HOOK_SCATTER if spec.hook else SCATTER
    if spec.hook and spec.size == 1:
        if spec.grad_placement is GradPlacement.REDUCED:
            yield HOOK_REDUCE
    # Without shards, a hook has taken the place of this all-reduce.
    elif spec.replicas > 1 and spec.grad_placement is GradPlacement.REDUCED:
        yield REPLICATE


def scale_before(b: GraphBuilder, message: fx.Node, spec: UnshardSpec) -> fx.Node:
    """Records the division of a message before its first collective, if there is one."""
    factor = scaling(spec).before
    return message if factor is None else b.call(aten.div.Tensor, message, factor)


def scale_after(b: GraphBuilder, shard: fx.Node, spec: UnshardSpec) -> fx.Node:
    """Records the division of a sum over all ranks, if there is one."""
    factor = scaling(spec).after
    if factor is None or spec.grad_placement is not GradPlacement.REDUCED:
        return shard
    with b.as_role(Role.SHARD_GRADIENT):
        return b.call(aten.div.Tensor, shard, factor)


def add_partial(b: GraphBuilder, partial: fx.Node, begin: int, shard: fx.Node) -> fx.Node:
    """Records the sum of a reduced message and of the accumulated gradients of its slots, from element `begin` on."""
    with b.as_role(Role.ADD_PARTIAL):
        held = narrow(b, partial, 0, begin, begin + b.value(shard).shape[0])
        # Where it travels in fewer bits than it accumulates in, the sum is in more than the message.
        return cast(b, b.call(aten.add.Tensor, held, shard), b.value(shard).dtype)


def reduce_one(b: GraphBuilder, message: fx.Node, spec: UnshardSpec, partial: fx.Node | None = None) -> fx.Node:
    """Records the reduction of one message, `[size * extent]`; the result is this rank's `[extent]`.

    `partial` has the accumulated gradients of the whole flat parameter that wait for their sum over replicas.
    """
    for stage in stages(spec):
        if stage.start is Role.REPLICATE and partial is not None:
            message = add_partial(b, partial, spec.offset, message)
        with b.as_role(stage.start):
            message = b.call(stage.single, message, *stage.arguments(spec))
        with b.as_role(stage.wait):
            message = b.call(collectives.wait_tensor.default, message)
    return scale_after(b, message, spec)
