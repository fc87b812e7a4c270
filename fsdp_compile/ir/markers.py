"""`fsdp::reshard`: the point in a graph after which gathered messages are gone.

It computes nothing. Memory is freed by reference counts (eager lowering) and by Inductor's own liveness, both of which
follow the last use; the marker says in the graph where that is, so that people can read it and the verifier check it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx


@torch.library.custom_op("fsdp::reshard", mutates_args=())
def reshard(messages: Sequence[torch.Tensor]) -> None:
    """Marks gathered messages as freed."""


@reshard.register_fake
def _(messages: Sequence[torch.Tensor]) -> None:  # noqa: ARG001
    return None


RESHARD = torch.ops.fsdp.reshard.default
fx.node.has_side_effect(RESHARD)


def erase_markers(graph: fx.Graph) -> None:
    """Removes the markers, which no compiler needs."""
    for node in list(graph.nodes):
        if node.target is RESHARD:
            graph.erase_node(node)
