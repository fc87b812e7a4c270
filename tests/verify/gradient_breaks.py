"""Correct graphs whose gradients are averaged, looked up or taken by updates, each broken by one edit of that."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import KEY, Role, StepGraph, require, role_of
from tests.verify.breaks import BACKWARD, FORWARD, breaks, copied, input_of, last_of, nodes_of, returned_by
from tests.verify.captured import World
from tests.verify.graphs import ALONE, LOOKED_UP, UPDATED

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
HALF = World(2, policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
"""Its reductions sum what a node of its own has divided."""


def _cast(node: fx.Node, role: Role, dtype: torch.dtype) -> fx.Node:
    record = dataclasses.replace(require(node), role=role)
    with node.graph.inserting_after(node):
        return GraphBuilder(node.graph, record, node).call(CAST, node, dtype)


@breaks("reduced-once", BACKWARD, "is reduced as torch.bfloat16")
def gradient_reduced_in_a_narrower_dtype(step: StepGraph) -> fx.Node:
    """What is sent is rounded; what arrives is as wide as it should be."""
    start = last_of(step, Role.REDUCE)
    for message in start.all_input_nodes:
        start.replace_input_with(message, _cast(message, Role.GRADIENT, torch.bfloat16))
    for item in start.users:
        (wait,) = item.users
        for node in (item, wait):
            node.meta["val"] = node.meta["val"].to(torch.bfloat16)
        wide = _cast(wait, Role.SHARD_GRADIENT, torch.float32)
        wait.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)  # type: ignore[misc]
    return start


@breaks("reduced-once", BACKWARD, "is divided by 4", world=HALF)
def sum_divided_by_another_number(step: StepGraph) -> fx.Node:
    start = last_of(step, Role.REDUCE)
    divided = next(message for message in start.all_input_nodes if message.target is aten.div.Tensor)
    divided.update_arg(1, 4.0)
    return start


@breaks("gathered-once", FORWARD, "another slot", model="tables", world=LOOKED_UP)
def looked_up_in_another_table(step: StepGraph) -> fx.Node:
    one, other = step.nodes(Role.LOOK_UP)
    one.update_arg(2, other.args[2])
    return one


@breaks("reduced-once", BACKWARD, "puts element", model="tables", world=LOOKED_UP)
def averages_swapped(step: StepGraph) -> fx.Node:
    one, other = step.nodes(Role.AVERAGE_ROWS)
    (joined,) = one.users
    joined.args = ([{one: other, other: one}.get(part, part) for part in joined.args[0]], *joined.args[1:])  # type: ignore[union-attr, arg-type]
    return joined


@breaks("reduced-once", BACKWARD, "puts element", model="tables", world=LOOKED_UP)
def average_of_another_table(step: StepGraph) -> fx.Node:
    one, other = step.nodes(Role.AVERAGE_ROWS)
    one.update_arg(2, other.args[2])
    return next(node for node in step.nodes(Role.FLAT_GRADIENT) if one in node.all_input_nodes)


@breaks("reduced-once", BACKWARD, "reaches no output", model="tables", world=LOOKED_UP)
def average_left_out(step: StepGraph) -> fx.Node:
    one, _ = step.nodes(Role.AVERAGE_ROWS)
    (joined,) = one.users
    with step.graph.inserting_before(joined):
        zeros = step.graph.call_function(torch.ops.aten.new_zeros.default, (one, [one.meta["val"].numel()]))
    zeros.meta = {"val": one.meta["val"], KEY: dataclasses.replace(require(one), role=Role.SHARD_GRADIENT)}
    joined.replace_input_with(one, zeros)
    return one


@breaks("typed", FORWARD, "carries no record", model="tables", world=LOOKED_UP)
def lookup_without_a_record(step: StepGraph) -> fx.Node:
    node = next(iter(step.nodes(Role.LOOK_UP)))
    del node.meta[KEY]
    return node


collectives = torch.ops._c10d_functional


@breaks("updated-last", BACKWARD, "after %update", world=ALONE)
def shard_read_in_place_after_its_update(step: StepGraph) -> fx.Node:
    update = nodes_of(step, Role.UPDATE)[0]
    views = [node for node in step.nodes(Role.FULL) if _flat_of(node) is update.args[0]]
    reader = next(user for user in views[0].users if role_of(user) is None)
    return copied(reader, {}, update)


def _flat_of(node: fx.Node) -> fx.Node:
    while node.op == "call_function":
        node = node.all_input_nodes[0]
    return node


@breaks("updated-last", BACKWARD, "after %update", world=UPDATED)
def shard_sent_after_its_update(step: StepGraph) -> fx.Node:
    update = nodes_of(step, Role.UPDATE)[0]
    gather = next(node for node in step.nodes(Role.GATHER) if _flat_of(node) is update.args[0])
    return copied(gather, {}, update)


@breaks("updated-last", BACKWARD, "after %update", world=UPDATED)
def shard_updated_while_the_program_sends_it(step: StepGraph) -> fx.Node:
    """Its own all-gather starts before the update, which is waited for after it."""
    update = nodes_of(step, Role.UPDATE)[0]
    flat = input_of(update)
    with step.graph.inserting_before(update):
        start = step.graph.call_function(collectives.all_gather_into_tensor.default, (flat, 2, "0"))
    with step.graph.inserting_after(update):
        wait = step.graph.call_function(collectives.wait_tensor.default, (start,))
    start.meta["val"] = wait.meta["val"] = torch.cat([flat.meta["val"]] * 2)
    return wait


@breaks("updated-last", BACKWARD, "updates already", world=UPDATED)
def update_made_twice(step: StepGraph) -> fx.Node:
    update = nodes_of(step, Role.UPDATE)[0]
    return copied(update, {}, update)


@breaks("updated-last", BACKWARD, "not its gradient", world=UPDATED)
def update_with_the_gradient_of_another_unit(step: StepGraph) -> fx.Node:
    first, second = nodes_of(step, Role.UPDATE)[:2]
    mine, other = first.args[1], second.args[1]
    first.args, second.args = (first.args[0], other, first.args[2]), (second.args[0], mine, second.args[2])
    second.append(first)
    return first


@breaks("updated-last", BACKWARD, "updates slots", world=UPDATED)
def slot_left_out_of_an_update(step: StepGraph) -> fx.Node:
    update = nodes_of(step, Role.UPDATE)[0]
    update.update_arg(2, list(update.args[2])[:-1])  # type: ignore[arg-type]
    return update


@breaks("updated-last", BACKWARD, "leaves the graph", world=UPDATED)
def gradient_returned_in_place_of_its_update(step: StepGraph) -> fx.Node:
    update = nodes_of(step, Role.UPDATE)[0]
    gradient = input_of(update, 1)
    returned = returned_by(step)
    returned[returned.index(None)] = gradient
    step.output.args = (returned,)
    step.graph.erase_node(update)
    return gradient


@breaks("typed", BACKWARD, "carries no record", world=UPDATED)
def update_without_a_record(step: StepGraph) -> fx.Node:
    update = nodes_of(step, Role.UPDATE)[0]
    del update.meta[KEY]
    return update
