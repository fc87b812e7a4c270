"""`fsdp::update`: by which a compiled backward offers a flat gradient for the update, in the middle of the graph.

It writes to the flat shard, and says so: what reads the flat shard stays before it, and no compiler takes it away. The
gradient is the graph's own memory, which may be used again afterwards: who keeps it longer keeps a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_compile import _torch
from fsdp_compile.parameters import epilogue, handover, updating
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.spec import Sync

_LIBRARY = torch.library.Library("fsdp", "FRAGMENT")
# Settings of the optimizer are read when it runs: a recording of its kernels would repeat those of the first time.
_LIBRARY.define("update(Tensor(a!) flat, Tensor gradient, int[] offsets) -> ()", tags=(torch.Tag.cudagraph_unsafe,))


def update(flat: torch.Tensor, gradient: torch.Tensor, offsets: Sequence[int]) -> None:
    """Updates parameters, or leaves their gradients for a later graph of this backward, or for its end.

    Args:
        flat: The flat shard, `[numel]`.
        gradient: Its gradient, summed over all ranks, `[numel]`.
        offsets: Slots that have gradients in it.
    """
    owner = FlatShard.of(flat)
    assert owner is not None  # `lower/runtime.py` has looked
    if not _torch.is_accumulated_in_this_backward(owner.leaf):
        return  # `torch.autograd.grad` asks for other gradients
    updating.refuse_second(owner)
    owner.held.confirm()
    owner.partial.confirm()
    epilogue.expect(owner)
    is_last = updating.is_complete(owner) and owner.progress.readers == 0
    waiting = owner.leaf.grad
    if waiting is not None:
        gradient = waiting + gradient
    elif not is_last or _is_kept(owner, offsets):
        gradient = gradient.clone()
    owner.leaf.grad = gradient
    owner.undelivered |= set(offsets)
    if is_last:
        handover.hand_over(owner)
        updating.run(owner)
    else:
        owner.note_gradients(offsets, Sync.ALL)  # for the leaf's hook, which autograd calls although it adds nothing


def _is_kept(flat: FlatShard, offsets: Sequence[int]) -> bool:
    """Whether somebody may keep a gradient longer than the update: a hook, or an optimizer that steps later."""
    trained = [slot.parameter for slot in flat.slots_at(offsets)]
    return any(updating.updater_of(p) is None or _torch.has_gradient_hooks(p) for p in trained)


_LIBRARY.impl("update", update, "CompositeExplicitAutograd")


UPDATE = torch.ops.fsdp.update.default


@torch.library.register_fake("fsdp::update", lib=_LIBRARY)
def _(flat: torch.Tensor, gradient: torch.Tensor, offsets: Sequence[int]) -> None:
    """Changes no shape."""
