"""Memory that a graph frees too late, never, or holds too much of; wrong records; what belongs to one rank."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fsdp_compile.ir.graph import KEY, Role, StepGraph, require, role_of
from fsdp_compile.layout.spec import Reshard
from fsdp_compile.verify.facts import Limits
from tests.verify.breaks import (
    ALONE,
    BACKWARD,
    FORWARD,
    POST,
    aten,
    breaks,
    copied,
    input_of,
    last_of,
    nodes_of,
    returned_by,
    users_of,
)
from tests.verify.graphs import KEPT, OPEN


@breaks("markers-gone", FORWARD, "marker")
def marker_left(step: StepGraph) -> fx.Node:
    flat = last_of(step, Role.FLAT)
    with step.graph.inserting_before(step.output):
        return step.graph.call_function(torch.ops.fsdp_compile.unshard.default, (flat, require(flat).specs[0].text))


@breaks("no-use-after-reshard", BACKWARD, "never resharded")
def reshard_deleted(step: StepGraph) -> fx.Node:
    step.graph.erase_node(last_of(step, Role.RESHARD))
    return last_of(step, Role.GATHER)


@breaks("no-use-after-reshard", FORWARD, "freed it")
@breaks("no-use-after-reshard", FORWARD, "freed it", bucket_mb=1)
def reshard_before_the_last_use(step: StepGraph) -> fx.Node:
    marker = last_of(step, Role.RESHARD)
    marker.all_input_nodes[-1].append(marker)
    return users_of(marker.all_input_nodes[-1], Role.COPY_OUT)[0]


@breaks("no-use-after-reshard", FORWARD, "already")
def reshard_twice(step: StepGraph) -> fx.Node:
    marker = last_of(step, Role.RESHARD)
    return copied(marker, {}, marker)


@breaks("no-use-after-reshard", FORWARD, "unsharded")
def reshard_of_some_messages(step: StepGraph) -> fx.Node:
    marker = last_of(step, Role.RESHARD)
    marker.args = (marker.all_input_nodes[:-1],)
    return marker


def _save(step: StepGraph, node: fx.Node) -> None:
    step.output.args = ([*returned_by(step), node],)
    step.output.meta["desc"] = [*step.output.meta["desc"], step.output.meta["desc"][-1]]


@breaks("nothing-unsharded-saved", FORWARD, "256 bytes")
@breaks("nothing-unsharded-saved", FORWARD, "256 bytes", bucket_mb=1)
def copied_parameter_saved(step: StepGraph) -> fx.Node:
    full = next(n for n in step.nodes(Role.FULL) if require(n).parameters[0].endswith("norm.bias"))
    _save(step, full)
    return full


@breaks("nothing-unsharded-saved", FORWARD, "weight alone", world=OPEN)
@breaks("nothing-unsharded-saved", FORWARD, "weight alone")
def transposed_parameter_saved(step: StepGraph) -> fx.Node:
    """As the default partitioner does; the bucket then cannot be resharded."""
    marker = last_of(step, Role.RESHARD)
    message = marker.all_input_nodes[-1]
    step.graph.erase_node(marker)
    full = next(n for n in step.nodes(Role.FULL) if input_of(input_of(n)) is message)
    transposed = next(iter(full.users))
    _save(step, transposed)
    return transposed


@breaks("nothing-unsharded-saved", BACKWARD, "forward kept", world=OPEN)
def parameter_taken_that_was_to_be_freed(step: StepGraph) -> fx.Node:
    saved = last_of(step, Role.SAVED_PARAM)
    (spec,) = require(saved).specs
    freed = dataclasses.replace(spec, reshard=Reshard.AFTER_FORWARD)
    saved.meta[KEY] = dataclasses.replace(require(saved), specs=(freed,))
    return saved


@breaks("nothing-unsharded-saved", FORWARD, "keeps 512 bytes", world=KEPT)
def part_of_the_neighbour_kept(step: StepGraph) -> fx.Node:
    """What is cut out of a packed part starts at another parameter."""
    cut = next(n for n in step.nodes(Role.POST_FORWARD_SHARD) if n.target is aten.slice.Tensor)
    cut.args = (*cut.args[:2], cut.args[2] + 64, cut.args[3] + 64)  # type: ignore[operator]
    kept = cut
    while kept not in returned_by(step):
        kept = next(iter(kept.users))
    return kept


@breaks("nothing-unsharded-saved", BACKWARD, "leaves the backward graph")
def gathered_memory_returned_by_backward(step: StepGraph) -> fx.Node:
    marker = last_of(step, Role.RESHARD)
    message = marker.all_input_nodes[-1]
    step.graph.erase_node(marker)
    step.output.args = ([*returned_by(step), message],)
    return message


@breaks("unsharded-bytes", FORWARD, "2 others", limits=Limits(prefetch=1))
def gather_started_too_early(step: StepGraph) -> fx.Node:
    """The third bucket starts at the top, beside the first two."""
    starts = nodes_of(step, Role.GATHER)
    for node in [*starts[2].all_input_nodes, starts[2]]:
        next(n for n in step.graph.nodes if role_of(n) is Role.GATHER_WAIT).prepend(node)
    return starts[2]


@breaks("unsharded-bytes", BACKWARD, "is held", limits=ALONE, prefetch=POST)
def gather_beside_another(step: StepGraph) -> fx.Node:
    """The second bucket starts before the first one is freed."""
    gather = nodes_of(step, Role.GATHER)[1]
    for node in [*gather.all_input_nodes, gather]:
        nodes_of(step, Role.RESHARD)[0].prepend(node)
    return gather


@breaks("explicit-prefetch", FORWARD, "told to prefetch, after %")
def told_to_prefetch_and_gathered_elsewhere(step: StepGraph) -> fx.Node:
    """The list says the first bucket; the gather starts at the second one."""
    starts = nodes_of(step, Role.GATHER)
    last, first = require(starts[2]).unit, require(starts[0]).unit
    flat = next(node for node in nodes_of(step, Role.FLAT) if require(node).unit == first)
    record = require(flat)
    specs = tuple(dataclasses.replace(spec, forward_prefetch=(last,)) for spec in record.specs)
    for node in step.graph.nodes:
        if role_of(node) is not None and require(node).unit == first:
            own = dict(zip(record.specs, specs, strict=True))
            node.meta[KEY] = dataclasses.replace(require(node), specs=tuple(own[s] for s in require(node).specs))
    return starts[2]


@breaks("unsharded-bytes", FORWARD, "bytes", limits=Limits(unsharded_bytes=200_000))
def bucket_beyond_the_budget(step: StepGraph) -> fx.Node:
    return nodes_of(step, Role.GATHER)[1]


@breaks("unsharded-bytes", BACKWARD, "bytes", world=OPEN, limits=Limits(unsharded_bytes=100_000))
def kept_beyond_the_budget(step: StepGraph) -> fx.Node:
    return nodes_of(step, Role.GATHER)[0]


@breaks("unsharded-bytes", FORWARD, "which needs none", limits=Limits(prefetch=1))
@breaks("unsharded-bytes", FORWARD, "which needs none", bucket_mb=1, limits=Limits(prefetch=1))
def reshard_at_the_end(step: StepGraph) -> fx.Node:
    marker = nodes_of(step, Role.RESHARD)[0]
    step.output.prepend(marker)
    return marker


@breaks("nothing-rank-specific", BACKWARD, "'0'")
def group_named_after_its_ranks(step: StepGraph) -> fx.Node:
    """Torch's own name of the group, which differs between the shard groups of a 2-D mesh."""
    for node in nodes_of(step, Role.REDUCE):
        node.update_arg(3, "0")
    return last_of(step, Role.REDUCE)


@breaks("nothing-rank-specific", FORWARD, "of the flat parameter")
def slice_at_the_rank(step: StepGraph) -> fx.Node:
    part = last_of(step, Role.SHARD)
    part.args = (*part.args[:2], part.args[2] + 1, part.args[3] + 1)  # type: ignore[operator]
    return part


@breaks("nothing-rank-specific", FORWARD, "cuda:3")
def device_of_this_rank(step: StepGraph) -> fx.Node:
    full = last_of(step, Role.FULL)
    full.kwargs = {"device": torch.device("cuda", 3)}
    return full


@breaks("nothing-rank-specific", BACKWARD, "constant")
def constant_of_this_process(step: StepGraph) -> fx.Node:
    flat = last_of(step, Role.FLAT_GRADIENT)
    step.gm.register_buffer("padding", torch.zeros(32))
    with step.graph.inserting_before(flat):
        padding = step.graph.get_attr("padding")
    padding.meta["val"] = flat.all_input_nodes[0].meta["val"]
    flat.args = ([*flat.all_input_nodes, padding],)
    return flat


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


@breaks("buffers-aligned", FORWARD, "inside of", model="partial")
def slots_overlap(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.bias", extent=64)


@breaks("buffers-aligned", FORWARD, "not aligned", model="partial")
def slot_off_the_grid(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.weight", extent=-1)


@breaks("buffers-aligned", FORWARD, "for a shard of", model="partial")
def slot_smaller_than_its_shard(step: StepGraph) -> fx.Node:
    return _change_slot(step, "unused.weight", extent=-32)


@breaks("buffers-aligned", FORWARD, "beyond", model="partial")
def slot_beyond_the_end(step: StepGraph) -> fx.Node:
    flat = next(n for n in step.nodes(Role.FLAT) if "unused.weight" in require(n).parameters)
    return _change_slot(step, "unused.weight", offset=flat.meta["val"].numel())


@breaks("typed", BACKWARD, "forward in the backward graph")
def phase_of_the_other_graph(step: StepGraph) -> fx.Node:
    wait = last_of(step, Role.GATHER_WAIT)
    wait.meta[KEY] = dataclasses.replace(require(wait), phase=FORWARD)
    return wait


@breaks("typed", BACKWARD, "carries no record")
def record_forgotten(step: StepGraph) -> fx.Node:
    wait = last_of(step, Role.GATHER_WAIT)
    del wait.meta[KEY]
    return wait


@breaks("typed", BACKWARD, "carries no record")
def collective_without_a_record(step: StepGraph) -> fx.Node:
    start = last_of(step, Role.REDUCE)
    del start.meta[KEY]
    return start


@breaks("typed", FORWARD, "recorded as gather")
def view_recorded_as_a_gather(step: StepGraph) -> fx.Node:
    part = last_of(step, Role.COPY_OUT)
    part.meta[KEY] = dataclasses.replace(require(part), role=Role.GATHER)
    return part


@breaks("typed", FORWARD, "0 parameters")
def record_of_nothing(step: StepGraph) -> fx.Node:
    part = last_of(step, Role.COPY_OUT)
    part.meta[KEY] = dataclasses.replace(require(part), parameters=(), specs=())
    return part
