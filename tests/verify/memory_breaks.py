"""Memory of parameters that a graph frees too late, never, or holds too much of."""

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
    Break,
    aten,
    copied,
    input_of,
    last_of,
    nodes_of,
    returned_by,
    users_of,
)
from tests.verify.graphs import KEPT, OPEN

# markers-gone


def marker_left(step: StepGraph) -> fx.Node:
    flat = last_of(step, Role.FLAT)
    with step.graph.inserting_before(step.output):
        return step.graph.call_function(torch.ops.fsdp_compile.unshard.default, (flat, require(flat).specs[0].text))


# no-use-after-reshard


def reshard_deleted(step: StepGraph) -> fx.Node:
    step.graph.erase_node(last_of(step, Role.RESHARD))
    return last_of(step, Role.GATHER)


def reshard_before_the_last_use(step: StepGraph) -> fx.Node:
    marker = last_of(step, Role.RESHARD)
    marker.all_input_nodes[-1].append(marker)
    return users_of(marker.all_input_nodes[-1], Role.COPY_OUT)[0]


def reshard_twice(step: StepGraph) -> fx.Node:
    marker = last_of(step, Role.RESHARD)
    return copied(marker, {}, marker)


def reshard_of_some_messages(step: StepGraph) -> fx.Node:
    marker = last_of(step, Role.RESHARD)
    marker.args = (marker.all_input_nodes[:-1],)
    return marker


# nothing-unsharded-saved


def _save(step: StepGraph, node: fx.Node) -> None:
    step.output.args = ([*returned_by(step), node],)
    step.output.meta["desc"] = [*step.output.meta["desc"], step.output.meta["desc"][-1]]


def copied_parameter_saved(step: StepGraph) -> fx.Node:
    full = next(n for n in step.nodes(Role.FULL) if require(n).parameters[0].endswith("norm.bias"))
    _save(step, full)
    return full


def transposed_parameter_saved(step: StepGraph) -> fx.Node:
    """As the default partitioner does; the bucket then cannot be resharded."""
    marker = last_of(step, Role.RESHARD)
    message = marker.all_input_nodes[-1]
    step.graph.erase_node(marker)
    full = next(n for n in step.nodes(Role.FULL) if input_of(input_of(n)) is message)
    transposed = next(iter(full.users))
    _save(step, transposed)
    return transposed


def parameter_taken_that_was_to_be_freed(step: StepGraph) -> fx.Node:
    saved = last_of(step, Role.SAVED_PARAM)
    (spec,) = require(saved).specs
    freed = dataclasses.replace(spec, reshard=Reshard.AFTER_FORWARD)
    saved.meta[KEY] = dataclasses.replace(require(saved), specs=(freed,))
    return saved


def part_of_the_neighbour_kept(step: StepGraph) -> fx.Node:
    """What is cut out of a packed part starts at another parameter."""
    cut = next(n for n in step.nodes(Role.POST_FORWARD_SHARD) if n.target is aten.slice.Tensor)
    cut.args = (*cut.args[:2], cut.args[2] + 64, cut.args[3] + 64)  # type: ignore[operator]
    kept = cut
    while kept not in returned_by(step):
        kept = next(iter(kept.users))
    return kept


def gathered_memory_returned_by_backward(step: StepGraph) -> fx.Node:
    marker = last_of(step, Role.RESHARD)
    message = marker.all_input_nodes[-1]
    step.graph.erase_node(marker)
    step.output.args = ([*returned_by(step), message],)
    return message


# unsharded-bytes


def gather_started_too_early(step: StepGraph) -> fx.Node:
    """The third bucket starts at the top, beside the first two."""
    starts = nodes_of(step, Role.GATHER)
    for node in [*starts[2].all_input_nodes, starts[2]]:
        next(n for n in step.graph.nodes if role_of(n) is Role.GATHER_WAIT).prepend(node)
    return starts[2]


def gather_beside_another(step: StepGraph) -> fx.Node:
    """The second bucket starts before the first one is freed."""
    gather = nodes_of(step, Role.GATHER)[1]
    for node in [*gather.all_input_nodes, gather]:
        nodes_of(step, Role.RESHARD)[0].prepend(node)
    return gather


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


def bucket_beyond_the_budget(step: StepGraph) -> fx.Node:
    return nodes_of(step, Role.GATHER)[1]


def kept_beyond_the_budget(step: StepGraph) -> fx.Node:
    return nodes_of(step, Role.GATHER)[0]


def reshard_at_the_end(step: StepGraph) -> fx.Node:
    marker = nodes_of(step, Role.RESHARD)[0]
    step.output.prepend(marker)
    return marker


BREAKS = (
    Break("markers-gone", marker_left, FORWARD, "marker"),
    Break("no-use-after-reshard", reshard_deleted, BACKWARD, "never resharded"),
    Break("no-use-after-reshard", reshard_before_the_last_use, FORWARD, "freed it"),
    Break("no-use-after-reshard", reshard_twice, FORWARD, "already"),
    Break("no-use-after-reshard", reshard_of_some_messages, FORWARD, "unsharded"),
    Break("nothing-unsharded-saved", copied_parameter_saved, FORWARD, "256 bytes"),
    Break("nothing-unsharded-saved", transposed_parameter_saved, FORWARD, "weight alone"),
    Break("nothing-unsharded-saved", transposed_parameter_saved, FORWARD, "weight alone", world=OPEN),
    Break("nothing-unsharded-saved", parameter_taken_that_was_to_be_freed, BACKWARD, "forward kept", world=OPEN),
    Break("nothing-unsharded-saved", part_of_the_neighbour_kept, FORWARD, "keeps 512 bytes", world=KEPT),
    Break("nothing-unsharded-saved", gathered_memory_returned_by_backward, BACKWARD, "leaves the backward graph"),
    Break("unsharded-bytes", gather_started_too_early, FORWARD, "2 others", limits=Limits(prefetch=1)),
    Break(
        "unsharded-bytes",
        gather_beside_another,
        BACKWARD,
        "is held",
        limits=ALONE,
        prefetch=POST,
    ),
    Break("unsharded-bytes", bucket_beyond_the_budget, FORWARD, "bytes", limits=Limits(unsharded_bytes=200_000)),
    Break(
        "unsharded-bytes", kept_beyond_the_budget, BACKWARD, "bytes", world=OPEN, limits=Limits(unsharded_bytes=100_000)
    ),
    Break("unsharded-bytes", reshard_at_the_end, FORWARD, "which needs none", limits=Limits(prefetch=1)),
    Break("explicit-prefetch", told_to_prefetch_and_gathered_elsewhere, FORWARD, "told to prefetch, after %"),
)
