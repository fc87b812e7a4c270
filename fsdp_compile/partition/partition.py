"""Splits the joint graph so that gathered parameters are not saved for backward, unless that was asked for.

The default partitioner saves every gathered weight that backward needs, which turns full sharding silently into ZeRO-2.
Here a read, and everything computed from reads alone, is marked to be recomputed: backward reads again.

A read of a parameter with a post-forward shard becomes three markers. The part is saved for backward, everything else
is computed again there: forward has all three, and needs only the first; backward has the last.

    %w = fsdp_compile.unshard(%flat, spec)   ->   %full = fsdp_compile.unshard(%flat, spec)
                                          %part = fsdp_compile.shard_post_forward(%full, spec)
                                          %w = fsdp_compile.unshard_post_forward(%part, spec)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.dynamo import (
    CheckpointPolicy,
    SavedForBackwardsAOTOutput,
    min_cut_rematerialization_partition,
    updated_input,
)
from fsdp_compile.cost.sizes import concrete
from fsdp_compile.ir.edit import GraphBuilder, infer_value
from fsdp_compile.ir.graph import Phase, Role, require
from fsdp_compile.ir.queries import aliases, is_alias, parameter_only, read_text, unsharded_value, written
from fsdp_compile.layout.spec import Reshard, Update, parse
from fsdp_compile.ops.embedding import LOOK_UP
from fsdp_compile.ops.post_forward import SHARD_POST_FORWARD, UNSHARD_POST_FORWARD
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.partition.cast_before_gather import cast_before_gather
from fsdp_compile.partition.recompute import blocks, recompute

_LAST_REGION = 1 << 60
"""Later than any checkpointed region: a result that crosses into a later region would be saved (AC's own rule)."""


_LOOK_UPS = (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default, torch.ops.aten.gather.default)


def keep_from_hooks(joint: fx.Graph) -> None:
    """Keeps flat parameters from hooks on saved tensors, which may give backward copies it would not know.

    Autograd compares no versions of them then, as it compares none of FSDP2's. Those that are updated in backward are
    compared: a second backward reads other values.
    """
    for node in joint.nodes:
        if node.target in (UNSHARD, LOOK_UP) and parse(read_text(node)).update is Update.AFTER_BACKWARD:
            node.args[0].meta["saved_tensor_with_no_vc_check"] = True


def mark_reads(joint: fx.Graph) -> None:
    """Marks which values derived from parameters alone are recomputed in backward and which are saved.

    Rows that an input chooses of such a value are saved: torch would look them up again, and backward gather the table,
    where the table is not much larger than its rows, which may differ between ranks.
    """
    of_parameters = set(parameter_only(joint))
    for node in joint.nodes:
        if node.target in _LOOK_UPS and node not in of_parameters and node.args[0] in of_parameters:
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        if node not in of_parameters:
            continue
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _LAST_REGION
        if node.target is UNSHARD and unsharded_value(node) is None:
            spec = parse(read_text(node))
            # What one rank has alone is read in place: an update in backward would write into what is saved.
            is_updated = spec.size == 1 and spec.update is Update.IN_BACKWARD
            if spec.reshard is Reshard.AFTER_BACKWARD and not is_updated:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if node.target is SHARD_POST_FORWARD:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def partition(
    joint: fx.GraphModule, inputs: Any, *, recomputed: int = 0, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph into forward and backward with the min-cut partitioner, after marking.

    `inputs` and `kwargs` are as AOTAutograd passes them; the first `recomputed` blocks are computed again in backward.
    """
    cast_before_gather(joint.graph)
    shard_post_forward(joint.graph)
    if recomputed:
        recompute(blocks(joint.graph)[:recomputed])
    mark_reads(joint.graph)
    keep_from_hooks(joint.graph)
    kwargs.setdefault("compiler", "inductor")
    results = joint.graph.output_node().meta.get("desc")
    with _counted(joint.graph) as stand_ins:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        for half in (forward, backward):
            _restore(half.graph.nodes, stand_ins)
    count, output = kwargs["num_fwd_outputs"], forward.graph.output_node()
    if results is not None:  # torch does not describe the outputs of a forward that saves a state of random numbers
        returned = output.args[0]
        assert isinstance(returned, tuple | list)
        saved = map(SavedForBackwardsAOTOutput, range(len(returned) - count))
        output.meta.setdefault("desc", [*results[:count], *saved])
    save_copies_of_updated_inputs(forward.graph, backward.graph, count)
    return forward, backward


def shard_post_forward(joint: fx.Graph) -> None:
    """Rewrites the reads of a joint graph whose flat parameters are named."""
    reads: dict[tuple[fx.Node, str], list[fx.Node]] = {}
    for node in joint.find_nodes(op="call_function", target=UNSHARD):
        if unsharded_value(node) is None and parse(read_text(node)).post_forward_size > 1:
            reads.setdefault((node.args[0], read_text(node)), []).append(node)
    for (flat, text), markers in reads.items():
        first = markers[0]
        record = require(flat).of_one(parse(text), Role.POST_FORWARD_SHARD, Phase.FORWARD)
        b = GraphBuilder(joint, record, first)
        with joint.inserting_after(first):
            part = b.call(SHARD_POST_FORWARD, first, text)
        with joint.inserting_after(part):
            again = b.call(UNSHARD_POST_FORWARD, part, text)
            # It is a read, and markers have no record.
            del again.meta["fsdp"]
        for user in [user for marker in markers for user in marker.users if user is not part]:
            for marker in markers:
                user.replace_input_with(marker, again)
        for marker in markers[1:]:
            joint.erase_node(marker)


@contextmanager
def _counted(graph: fx.Graph) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Gives empty values a size in the block; yields what stands in the place of each, for copies of the nodes.

    A rank without rows has activations of no bytes. To save them costs nothing, so the min-cut partitioner would save
    them where other ranks compute theirs again, and backward would gather other parameters than theirs. While a graph
    is partitioned, each has the size that it has for an input of one row.
    """
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    rows: dict[fx.Node, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not any(map(_is_empty, value.shape)):
            continue
        source = next((one for one in node.all_input_nodes if one in rows), None)
        row = math.prod(concrete(size) for size in value.shape if not _is_empty(size))  # the other dimensions
        rows[node] = 1 if source is None else rows[source]
        if source is not None and is_alias(node):  # the same elements, in other rows
            rows[node] = max(1, source.meta["val"].numel() // row)
        node.meta["val"] = value.new_empty([rows[node] * row])
        stand_ins[node.meta["val"]] = value
    try:
        yield stand_ins
    finally:
        _restore(graph.nodes, stand_ins)


def _restore(nodes: Iterable[fx.Node], stand_ins: dict[torch.Tensor, torch.Tensor]) -> None:
    """Gives nodes their own values back."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value in stand_ins:
            node.meta["val"] = stand_ins[value]


def _is_empty(size: object) -> bool:
    return isinstance(size, int) and size == 0  # an open size is never compared, which would be a guard


def save_copies_of_updated_inputs(forward: fx.Graph, backward: fx.Graph, results: int) -> None:
    """Saves copies of inputs that forward updates, and of views of them, where backward needs them.

    A checkpointed batch norm reads its running statistics and returns new ones; a model scales by a counter that it
    increments. The partitioner saves such inputs as they are, to recompute in backward what was computed from them; by
    then the new values are in their memory. Autograd refuses them where the forward returns new values, and does not
    notice where the graph itself writes them.

        %y = sub(%h, %mean); copy_(%mean, %new); return (%y, %h, %mean)
        ->   %old = clone(%mean); %y = sub(%h, %mean); copy_(%mean, %new); return (%y, %h, %old)

    So a copy that the model makes, to have the old value in backward, is made as well: to Inductor it is a no-op.

    The first `results` outputs of `forward`, which are described if it returns new values, are not saved.
    """
    output = forward.output_node()
    returned = output.args[0]
    assert isinstance(returned, tuple | list)
    updated = frozenset(aliases(_updated_inputs(forward)))
    saved: list[Any] = list(returned[results:])
    copies = {node: _copy(node) for node in saved if node in updated}
    output.args = ((*returned[:results], *(copies.get(node, node) for node in saved)),)
    names = {node.name: copy.name for node, copy in copies.items()}
    for node in backward.find_nodes(op="placeholder"):
        if node.name in names:  # backward's input is found by the name of what forward saves for it
            with backward.inserting_before(node):
                renamed = backward.placeholder(names[node.name])
            renamed.meta = node.meta
            node.replace_all_uses_with(renamed)
            backward.erase_node(node)


def _updated_inputs(forward: fx.Graph) -> list[fx.Node]:
    """Inputs whose new values the graph returns, as its outputs are described, or writes, as Inductor asks for."""
    described = forward.output_node().meta.get("desc") or ()
    updated = set(map(updated_input, described)) - {None}
    inside = frozenset(written(forward))
    inputs = forward.find_nodes(op="placeholder")
    return [node for node in inputs if node in inside or node.meta.get("desc") in updated]


def _copy(node: fx.Node) -> fx.Node:
    """A copy of a value, made before the graph writes it."""
    after = node if node.op != "placeholder" else node.graph.find_nodes(op="placeholder")[-1]
    with node.graph.inserting_after(after):
        # The backward's input gets this name too: it has to be free there, where names like "clone" are taken.
        copy = node.graph.create_node(
            "call_function", torch.ops.aten.clone.default, (node,), name=f"before_update_of_{node.name}"
        )
    copy.meta["val"] = infer_value(copy)
    return copy
