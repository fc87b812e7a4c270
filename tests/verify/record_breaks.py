"""Records and layouts that one edit makes wrong, and what belongs to one rank alone."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fsdp_compile.ir.graph import KEY, Phase, Role, StepGraph, require
from tests.verify.breaks import BACKWARD, FORWARD, Break, last_of, nodes_of

# nothing-rank-specific


def group_named_after_its_ranks(step: StepGraph) -> fx.Node:
    """Torch's own name of the group, which differs between the shard groups of a 2-D mesh."""
    for node in nodes_of(step, Role.REDUCE):
        node.update_arg(3, "0")
    return last_of(step, Role.REDUCE)


def slice_at_the_rank(step: StepGraph) -> fx.Node:
    part = last_of(step, Role.SHARD)
    part.args = (*part.args[:2], part.args[2] + 1, part.args[3] + 1)  # type: ignore[operator]
    return part


def device_of_this_rank(step: StepGraph) -> fx.Node:
    full = last_of(step, Role.FULL)
    full.kwargs = {"device": torch.device("cuda", 3)}
    return full


def constant_of_this_process(step: StepGraph) -> fx.Node:
    flat = last_of(step, Role.FLAT_GRADIENT)
    step.gm.register_buffer("padding", torch.zeros(32))
    with step.graph.inserting_before(flat):
        padding = step.graph.get_attr("padding")
    padding.meta["val"] = flat.all_input_nodes[0].meta["val"]
    flat.args = ([*flat.all_input_nodes, padding],)
    return flat


# buffers-aligned


def _change_slot(step: StepGraph, name: str, *, offset: int = 0, extent: int = 0) -> fx.Node:
    """Moves or stretches a slot that nobody reads in this graph."""
    flat = next(n for n in step.nodes(Role.FLAT) if name in require(n).parameters)
    record = require(flat)
    specs = list(record.specs)
    place = record.parameters.index(name)
    spec = specs[place]
    specs[place] = dataclasses.replace(spec, offset=spec.offset + offset, extent=spec.extent + extent)
    flat.meta[KEY] = dataclasses.replace(record, specs=tuple(specs))
    return flat


def slots_overlap(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.bias", extent=64)


def slot_off_the_grid(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.weight", extent=-1)


def slot_smaller_than_its_shard(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.weight", extent=-32)


def slot_beyond_the_end(step: StepGraph) -> fx.Node:
    flat = next(n for n in step.nodes(Role.FLAT) if "unused.weight" in require(n).parameters)
    return _change_slot(step, "unused.weight", offset=flat.meta["val"].numel())


# typed


def phase_of_the_other_graph(step: StepGraph) -> fx.Node:
    wait = last_of(step, Role.GATHER_WAIT)
    wait.meta[KEY] = dataclasses.replace(require(wait), phase=Phase.FORWARD)
    return wait


def record_forgotten(step: StepGraph) -> fx.Node:
    wait = last_of(step, Role.GATHER_WAIT)
    del wait.meta[KEY]
    return wait


def collective_without_a_record(step: StepGraph) -> fx.Node:
    start = last_of(step, Role.REDUCE)
    del start.meta[KEY]
    return start


def view_recorded_as_a_gather(step: StepGraph) -> fx.Node:
    part = last_of(step, Role.COPY_OUT)
    part.meta[KEY] = dataclasses.replace(require(part), role=Role.GATHER)
    return part


def record_of_nothing(step: StepGraph) -> fx.Node:
    part = last_of(step, Role.COPY_OUT)
    part.meta[KEY] = dataclasses.replace(require(part), parameters=(), specs=())
    return part


BREAKS = (
    Break("nothing-rank-specific", group_named_after_its_ranks, BACKWARD, "'0'"),
    Break("nothing-rank-specific", slice_at_the_rank, FORWARD, "of the flat parameter"),
    Break("nothing-rank-specific", device_of_this_rank, FORWARD, "cuda:3"),
    Break("nothing-rank-specific", constant_of_this_process, BACKWARD, "constant"),
    Break("buffers-aligned", slots_overlap, FORWARD, "inside of", model="partial"),
    Break("buffers-aligned", slot_off_the_grid, FORWARD, "not aligned", model="partial"),
    Break("buffers-aligned", slot_smaller_than_its_shard, FORWARD, "for a shard of", model="partial"),
    Break("buffers-aligned", slot_beyond_the_end, FORWARD, "beyond", model="partial"),
    Break("typed", phase_of_the_other_graph, BACKWARD, "forward in the backward graph"),
    Break("typed", record_forgotten, BACKWARD, "carries no record"),
    Break("typed", collective_without_a_record, BACKWARD, "carries no record"),
    Break("typed", view_recorded_as_a_gather, FORWARD, "recorded as gather"),
    Break("typed", record_of_nothing, FORWARD, "0 parameters"),
)
