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

from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_compile._torch.dynamo import (
    CheckpointPolicy,
    SavedForBackwardsAOTOutput,
    min_cut_rematerialization_partition,
)
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Phase, Role, require
from fsdp_compile.ir.queries import parameter_only, read_text, unsharded_value
from fsdp_compile.layout.spec import Reshard, Update, parse
from fsdp_compile.ops.embedding import LOOK_UP
from fsdp_compile.ops.post_forward import SHARD_POST_FORWARD, UNSHARD_POST_FORWARD
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.partition.cast_before_gather import cast_before_gather
from fsdp_compile.partition.empty_values import counted, restore
from fsdp_compile.partition.recompute import blocks, recompute
from fsdp_compile.partition.updated_inputs import save_copies_of_updated_inputs

_LAST_REGION = 1 << 60
"""Later than any checkpointed region: a result that crosses into a later region would be saved (AC's own rule)."""


def keep_from_hooks(joint: fx.Graph) -> None:
    """Keeps flat parameters from hooks on saved tensors, which may give backward copies it would not know.

    Autograd compares no versions of them then, as it compares none of FSDP2's. Those that are updated in backward are
    compared: a second backward reads other values.
    """
    for node in joint.nodes:
        if node.target in (UNSHARD, LOOK_UP) and parse(read_text(node)).update is Update.AFTER_BACKWARD:
            node.args[0].meta["saved_tensor_with_no_vc_check"] = True


def mark_reads(joint: fx.Graph) -> None:
    """Marks which values derived from parameters alone are recomputed in backward and which are saved."""
    for node in parameter_only(joint):
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
    with counted(joint.graph) as stand_ins:
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        for half in (forward, backward):
            restore(half.graph.nodes, stand_ins)
    if results is not None:
        _describe_results(forward.graph.output_node(), results[: kwargs["num_fwd_outputs"]])
    save_copies_of_updated_inputs(forward.graph, backward.graph, kwargs["num_fwd_outputs"])
    return forward, backward


def _describe_results(output: fx.Node, results: Sequence[object]) -> None:
    """Describes what a forward returns and saves where torch has not: not of one that saves a state of random numbers.

    Args:
        output: Of the forward's graph.
        results: Descriptions of what the forward returns; all after these is saved.
    """
    returned = output.args[0]
    assert isinstance(returned, tuple | list)
    saved = len(returned) - len(results)
    output.meta.setdefault("desc", [*results, *map(SavedForBackwardsAOTOutput, range(saved))])


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
