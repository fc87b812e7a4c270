"""`fsdp::reshard`: the point in a graph after which gathered messages are gone.

It computes nothing. Memory is freed by reference counts (eager lowering) and by Inductor's own liveness, both of which
follow the last use; the marker says in the graph where that is, so that people can read it and the verifier check it.

`fsdp::update`: by which a compiled backward offers a flat gradient for the update, in the middle of the graph.

It writes to the flat parameter, and says so: what reads the flat parameter stays before it, and no compiler takes it
away. The gradient is the graph's own memory, which may be used again afterwards: who keeps it longer keeps a copy.
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


_LIBRARY = torch.library.Library("fsdp", "FRAGMENT")
# Settings of the optimizer are read when it runs: a recording of its kernels would repeat those of the first time.
_LIBRARY.define("update(Tensor(a!) flat, Tensor gradient, int[] offsets) -> ()", tags=(torch.Tag.cudagraph_unsafe,))


UPDATE = torch.ops.fsdp.update.default


@torch.library.register_fake("fsdp::update", lib=_LIBRARY)
def _(flat: torch.Tensor, gradient: torch.Tensor, offsets: Sequence[int]) -> None:
    """Changes no shape."""
