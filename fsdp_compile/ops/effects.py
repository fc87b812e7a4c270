"""Operators without a result: `reshard` marks where gathered messages are freed, `update` is an update in backward.

`poison` fills memory with NaN that is about to be freed, and `check_message` finds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fsdp_compile.errors import PoisonError


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
_ON_THE_HOST = (torch.Tag.cudagraph_unsafe,)
# All say that they write: compilers keep them, after what was read before them and before what is read afterwards.
# The gradient is memory of the graph, which may be reused: a kernel that stores it makes a copy. Not in a CUDA graph,
# which would repeat the optimizer's settings of the recording.
_LIBRARY.define("update(Tensor(a!) flat, Tensor gradient, int[] offsets) -> ()", tags=_ON_THE_HOST)
_LIBRARY.define("poison(Tensor(a!) message) -> ()")
# The host reads what it finds.
_LIBRARY.define("check_message(Tensor(a!) message, str what) -> ()", tags=_ON_THE_HOST)
for _name in ("update", "poison", "check_message"):
    torch.library.register_fake(f"fsdp_compile::{_name}", lambda *_: None, lib=_LIBRARY)


def poison(message: torch.Tensor) -> None:
    """Fills `message`, contiguous, of any dtype, with bytes 255: NaN in every floating point dtype that is sent."""
    message.view(torch.uint8).fill_(255)


def check_message(message: torch.Tensor, what: str) -> None:
    """Raises `PoisonError` if a floating point `message` has a NaN; the host waits for the device to know."""
    if not message.is_floating_point():
        return
    found = int(message.isnan().sum())
    if found:
        raise PoisonError(
            f"{what} has NaN in {found} of {message.numel()} elements: the values that were sent are NaN, or "
            "memory was read after it was freed, or before it was written",
            where="options={'poison': True}",
            instead="leave it out if losses are NaN without it, too; otherwise it is a bug of this package",
        )


_LIBRARY.impl("poison", poison, "CompositeExplicitAutograd")
_LIBRARY.impl("check_message", check_message, "CompositeExplicitAutograd")


UPDATE = torch.ops.fsdp_compile.update.default
POISON = torch.ops.fsdp_compile.poison.default
CHECK_MESSAGE = torch.ops.fsdp_compile.check_message.default
