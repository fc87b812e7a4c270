"""Reads of parameters with a post-forward shard between forward and backward, as three markers instead of one.

    %w = fsdp_compile.unshard(%flat, spec)   ->   %full = fsdp_compile.unshard(%flat, spec)
                                          %part = fsdp_compile.shard_post_forward(%full, spec)
                                          %w = fsdp_compile.unshard_post_forward(%part, spec)

The part is saved for backward, everything else is computed again there: forward has all three, and needs only the
first; backward has the last.
"""

from __future__ import annotations

from torch import fx

from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Phase, Record, Role, require
from fsdp_compile.ir.queries import read_text, unsharded_value
from fsdp_compile.layout.spec import parse
from fsdp_compile.ops.post_forward import SHARD_POST_FORWARD, UNSHARD_POST_FORWARD
from fsdp_compile.ops.unshard import UNSHARD


def shard_post_forward(joint: fx.Graph) -> None:
    """Rewrites the reads of a joint graph whose flat parameters are named."""
    reads: dict[tuple[fx.Node, str], list[fx.Node]] = {}
    for node in joint.find_nodes(op="call_function", target=UNSHARD):
        if unsharded_value(node) is None and parse(read_text(node)).post_forward_size > 1:
            reads.setdefault((node.args[0], read_text(node)), []).append(node)
    for (flat, text), markers in reads.items():
        first = markers[0]
        record = require(flat)
        spec = parse(text)
        name = record.parameters[[held.offset for held in record.specs].index(spec.offset)]
        b = GraphBuilder(joint, Record(Role.POST_FORWARD_SHARD, record.unit, (name,), (spec,), Phase.FORWARD), first)
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
