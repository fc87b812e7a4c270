"""`reshard`, which marks where gathered messages are freed, and `update`, an update in backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx


# It computes nothing: reference counts (eager lowering) and Inductor's liveness free memory after the last use. The
# marker says where that is, for people who read the graph and for the verifier.
@torch.library.custom_op("fsdp_compile::reshard", mutates_args=())
def reshard(messages: Sequence[torch.Tensor]) -> None:
    """Marks gathered messages as freed."""


@reshard.register_fake
def _(messages: Sequence[torch.Tensor]) -> None:  # noqa: ARG001
    return None


RESHARD = torch.ops.fsdp_compile.reshard.default
fx.node.has_side_effect(RESHARD)


def erase_markers(graph: fx.Graph) -> None:
    """Removes the markers, which no compiler needs."""
    for node in list(graph.nodes):
        if node.target is RESHARD:
            graph.erase_node(node)


_LIBRARY = torch.library.Library("fsdp_compile", "FRAGMENT")
# It mutates the flat parameter, so that reads of it stay before this, and no compiler removes it. The gradient is
# memory of the graph, which may be reused: a kernel that stores it makes a copy. Not in a CUDA graph, which would
# repeat the optimizer's settings of the recording.
_LIBRARY.define("update(Tensor(a!) flat, Tensor gradient, int[] offsets) -> ()", tags=(torch.Tag.cudagraph_unsafe,))


UPDATE = torch.ops.fsdp_compile.update.default


@torch.library.register_fake("fsdp_compile::update", lib=_LIBRARY)
def _(flat: torch.Tensor, gradient: torch.Tensor, offsets: Sequence[int]) -> None:
    """Changes no shape."""
