"""Saves what forward computed from inputs that it also updates, so that backward need not recompute it.

A checkpointed batch norm reads its running statistics and returns new ones; a model scales by a counter that it
increments. The min-cut partitioner would save the old values, to recompute in backward what was computed from them; by
then the new ones are in their memory, and autograd refuses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

from torch import fx

from fsdp_compile._torch.dynamo import CheckpointPolicy
from fsdp_compile.ir.queries import aliases, is_alias


def save_readers_of_updated_inputs(joint: fx.Graph) -> None:
    """Marks results that were computed from updated inputs to be saved, if backward needs them."""
    for shared in aliases(_updated_inputs(joint)):
        for reader in shared.users:
            if not is_alias(reader):
                for node in (reader, *_parts(reader)):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _updated_inputs(joint: fx.Graph) -> list[fx.Node]:
    """Inputs whose new values the graph returns, as AOTAutograd describes its outputs."""
    described = joint.output_node().meta.get("desc") or ()
    updated = {getattr(description, "mutated_input", None) for description in described} - {None}
    return [node for node in joint.find_nodes(op="placeholder") if node.meta.get("desc") in updated]


def _parts(node: fx.Node) -> Iterator[fx.Node]:
    """The elements of a result that is a tuple."""
    return (user for user in node.users if user.target is getitem)
