"""Correct graphs that update in backward, each broken by one edit."""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compile.ir.graph import KEY, Phase, Role, StepGraph, role_of
from tests.verify.breaks import Break
from tests.verify.graphs import ALONE, UPDATED

collectives = torch.ops._c10d_functional


def _updates(step: StepGraph) -> list[fx.Node]:
    return list(step.nodes(Role.UPDATE))


def _copy_behind(node: fx.Node, place: fx.Node) -> fx.Node:
    with node.graph.inserting_after(place):
        return node.graph.node_copy(node, lambda source: source)


def shard_read_in_place_after_its_update(step: StepGraph) -> fx.Node:
    update = _updates(step)[0]
    views = [node for node in step.nodes(Role.FULL) if _flat_of(node) is update.args[0]]
    reader = next(user for user in views[0].users if role_of(user) is None)
    return _copy_behind(reader, update)


def _flat_of(node: fx.Node) -> fx.Node:
    while node.op == "call_function":
        node = node.all_input_nodes[0]
    return node


def shard_sent_after_its_update(step: StepGraph) -> fx.Node:
    update = _updates(step)[0]
    gather = next(node for node in step.nodes(Role.GATHER) if _flat_of(node) is update.args[0])
    return _copy_behind(gather, update)


def shard_updated_while_the_program_sends_it(step: StepGraph) -> fx.Node:
    """Its own all-gather starts before the update, which is waited for after it."""
    update = _updates(step)[0]
    flat = update.args[0]
    assert isinstance(flat, fx.Node)
    with step.graph.inserting_before(update):
        start = step.graph.call_function(collectives.all_gather_into_tensor.default, (flat, 2, "0"))
    with step.graph.inserting_after(update):
        wait = step.graph.call_function(collectives.wait_tensor.default, (start,))
    start.meta["val"] = wait.meta["val"] = torch.cat([flat.meta["val"]] * 2)
    return wait


def update_made_twice(step: StepGraph) -> fx.Node:
    update = _updates(step)[0]
    return _copy_behind(update, update)


def update_with_the_gradient_of_another_unit(step: StepGraph) -> fx.Node:
    first, second = _updates(step)[:2]
    mine, other = first.args[1], second.args[1]
    first.args, second.args = (first.args[0], other, first.args[2]), (second.args[0], mine, second.args[2])
    second.append(first)
    return first


def slot_left_out_of_an_update(step: StepGraph) -> fx.Node:
    update = _updates(step)[0]
    update.update_arg(2, list(update.args[2])[:-1])  # type: ignore[arg-type]
    return update


def gradient_returned_in_place_of_its_update(step: StepGraph) -> fx.Node:
    update = _updates(step)[0]
    gradient = update.args[1]
    assert isinstance(gradient, fx.Node)
    returned = list(step.output.args[0])  # type: ignore[arg-type]
    returned[returned.index(None)] = gradient
    step.output.args = (returned,)
    step.graph.erase_node(update)
    return gradient


def update_without_a_record(step: StepGraph) -> fx.Node:
    update = _updates(step)[0]
    del update.meta[KEY]
    return update


BACKWARD = Phase.BACKWARD
UPDATE_BREAKS = (
    Break("updated-last", shard_read_in_place_after_its_update, BACKWARD, "after %update", world=ALONE),
    Break("updated-last", shard_sent_after_its_update, BACKWARD, "after %update", world=UPDATED),
    Break("updated-last", shard_updated_while_the_program_sends_it, BACKWARD, "after %update", world=UPDATED),
    Break("updated-last", update_made_twice, BACKWARD, "updates already", world=UPDATED),
    Break("updated-last", update_with_the_gradient_of_another_unit, BACKWARD, "not its gradient", world=UPDATED),
    Break("updated-last", slot_left_out_of_an_update, BACKWARD, "updates slots", world=UPDATED),
    Break("updated-last", gradient_returned_in_place_of_its_update, BACKWARD, "leaves the graph", world=UPDATED),
    Break("typed", update_without_a_record, BACKWARD, "carries no record", world=UPDATED),
)
