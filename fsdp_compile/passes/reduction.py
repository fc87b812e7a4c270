"""The collectives that make the average of a gradient, one after the other.

    shard group of F > 1 ranks     reduce-scatter: each rank keeps its 1/F, averaged over the group
    R > 1 replicas                 all-reduce of what is left, averaged over the replicas

Full sharding has the first stage, replicas without sharding the second, hybrid sharding both, one rank none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from torch import fx

from fsdp_compile._torch import OpOverload, collectives
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.record import Role
from fsdp_compile.parameters.spec import ReadSpec


@dataclasses.dataclass(frozen=True)
class ReduceStage:
    """One collective of a reduction.

    Attributes:
        start: Role of the node that starts it.
        item: Role of one message of a grouped one that is still running.
        wait: Role of the node that completes it.
        single: The operator for one message.
        grouped: The operator for a list of messages.
        arguments: What the operators take after the message or messages.
    """

    start: Role
    item: Role
    wait: Role
    single: OpOverload
    grouped: OpOverload
    arguments: Callable[[ReadSpec], tuple[object, ...]]


SCATTER = ReduceStage(
    Role.REDUCE,
    Role.REDUCE_ITEM,
    Role.REDUCE_WAIT,
    collectives.reduce_scatter_tensor.default,
    collectives.reduce_scatter_tensor_coalesced.default,
    lambda spec: ("avg", spec.size, spec.group),
)
REPLICATE = ReduceStage(
    Role.REPLICATE,
    Role.REPLICATE_ITEM,
    Role.REPLICATE_WAIT,
    collectives.all_reduce.default,
    collectives.all_reduce_coalesced.default,
    lambda spec: ("avg", spec.replicate_group),
)
STARTS = (Role.REDUCE, Role.REPLICATE)
"""Roles of the nodes that start a stage."""
ON_THE_WAY = (Role.REDUCE, Role.REDUCE_ITEM, Role.REDUCE_WAIT, Role.REPLICATE, Role.REPLICATE_ITEM, Role.REPLICATE_WAIT)
"""Roles of the nodes between a gradient's message and its average."""


def stages(spec: ReadSpec) -> Iterator[ReduceStage]:
    """The stages of a parameter's reduction, in order."""
    if spec.size > 1:
        yield SCATTER
    if spec.replicas > 1:
        yield REPLICATE


def reduce_one(b: GraphBuilder, message: fx.Node, spec: ReadSpec) -> fx.Node:
    """Records the reduction of one message of `[size * extent]` elements; the result is this rank's `[extent]`."""
    for stage in stages(spec):
        with b.as_role(stage.start):
            message = b.call(stage.single, message, *stage.arguments(spec))
        with b.as_role(stage.wait):
            message = b.call(collectives.wait_tensor.default, message)
    return message
