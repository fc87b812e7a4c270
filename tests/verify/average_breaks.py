"""Correct graphs whose gradients reach their places, each broken by one edit of how they are averaged on the way."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Phase, Role, StepGraph, require
from tests.verify.breaks import Break
from tests.verify.captured import World

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
HALF = World(2, policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
"""Its reductions sum what a node of its own has divided."""


def _last_reduce(step: StepGraph) -> fx.Node:
    *_, start = step.nodes(Role.REDUCE)
    return start


def _cast(node: fx.Node, role: Role, dtype: torch.dtype) -> fx.Node:
    record = dataclasses.replace(require(node), role=role)
    with node.graph.inserting_after(node):
        return GraphBuilder(node.graph, record, node).call(CAST, node, dtype)


def gradient_reduced_in_a_narrower_dtype(step: StepGraph) -> fx.Node:
    """What is sent is rounded; what arrives is as wide as it should be."""
    start = _last_reduce(step)
    for message in start.all_input_nodes:
        start.replace_input_with(message, _cast(message, Role.GRADIENT, torch.bfloat16))
    for item in start.users:
        (wait,) = item.users
        for node in (item, wait):
            node.meta["val"] = node.meta["val"].to(torch.bfloat16)
        wide = _cast(wait, Role.SHARD_GRADIENT, torch.float32)
        wait.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)  # type: ignore[misc]
    return start


def sum_divided_by_another_number(step: StepGraph) -> fx.Node:
    start = _last_reduce(step)
    divided = next(message for message in start.all_input_nodes if message.target is aten.div.Tensor)
    divided.update_arg(1, 4.0)
    return start


AVERAGE_BREAKS = (
    Break("reduced-once", gradient_reduced_in_a_narrower_dtype, Phase.BACKWARD, "is reduced as torch.bfloat16"),
    Break("reduced-once", sum_divided_by_another_number, Phase.BACKWARD, "is divided by 4", world=HALF),
)
