"""Graphs with embeddings that stay sharded, each broken by one edit, and the rule that has to notice."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fsdp_compile.ir.graph import KEY, Role, StepGraph, require
from tests.verify.breaks import BACKWARD, FORWARD, Break
from tests.verify.graphs import LOOKED_UP


def looked_up_in_another_table(step: StepGraph) -> fx.Node:
    one, other = step.nodes(Role.LOOK_UP)
    one.update_arg(2, other.args[2])
    return one


def averages_swapped(step: StepGraph) -> fx.Node:
    one, other = step.nodes(Role.AVERAGE_ROWS)
    (joined,) = one.users
    joined.args = ([{one: other, other: one}.get(part, part) for part in joined.args[0]], *joined.args[1:])  # type: ignore[union-attr, arg-type]
    return joined


def average_of_another_table(step: StepGraph) -> fx.Node:
    one, other = step.nodes(Role.AVERAGE_ROWS)
    one.update_arg(2, other.args[2])
    return next(node for node in step.nodes(Role.FLAT_GRADIENT) if one in node.all_input_nodes)


def average_left_out(step: StepGraph) -> fx.Node:
    one, _ = step.nodes(Role.AVERAGE_ROWS)
    (joined,) = one.users
    with step.graph.inserting_before(joined):
        zeros = step.graph.call_function(torch.ops.aten.new_zeros.default, (one, [one.meta["val"].numel()]))
    zeros.meta = {"val": one.meta["val"], KEY: dataclasses.replace(require(one), role=Role.SHARD_GRADIENT)}
    joined.replace_input_with(one, zeros)
    return one


def lookup_without_a_record(step: StepGraph) -> fx.Node:
    node = next(iter(step.nodes(Role.LOOK_UP)))
    del node.meta[KEY]
    return node


LOOKUP_BREAKS = (
    Break("gathered-once", looked_up_in_another_table, FORWARD, "another slot", "tables", LOOKED_UP),
    Break("reduced-once", averages_swapped, BACKWARD, "puts element", "tables", LOOKED_UP),
    Break("reduced-once", average_of_another_table, BACKWARD, "puts element", "tables", LOOKED_UP),
    Break("reduced-once", average_left_out, BACKWARD, "reaches no output", "tables", LOOKED_UP),
    Break("typed", lookup_without_a_record, FORWARD, "carries no record", "tables", LOOKED_UP),
)
