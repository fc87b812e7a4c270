"""Gradients of small parameters that are given to them again in the next step, with other values.

Views and DTensors of a small gradient take longer to make, and to free, than everything else that is done for it. So
what parameters were given last is kept, and is given again where nothing tells it from new: nobody else holds any of
it, or memory of it, and nobody has changed more of it than values. Where somebody has, new ones are made and the old
ones are theirs alone.

On the CPU alone: on other devices a stream may still read what the host has forgotten, and nothing tells.

The memory is kept from one backward to the next, also while parameters have no gradients. It is that of small
parameters alone: making views of large ones takes no longer than copying into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_compile._torch import Unshared, ViewPlace, give_gradients, make_dtensors, views_of

if TYPE_CHECKING:
    from fsdp_compile.parameters.flat import FlatShard


class GradientViews:
    """What the parameters of some flat shards are given as gradients, all of one dtype and device.

    Args:
        flats: The flat shards, which have small gradients.
        parameters: Theirs, in their order.
    """

    def __init__(self, flats: Sequence[FlatShard], parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        leaf = flats[0].leaf
        # Memory of its own, since a gradient may share its memory with others that a graph has made.
        self._whole = torch.empty(sum(flat.leaf.numel() for flat in flats), dtype=leaf.dtype, device=leaf.device)
        views = views_of(self._whole, _places(flats))
        self._gradients = make_dtensors(views, self._parameters)
        self._unshared = Unshared(self._whole, views, self._gradients)

    def may_be_given(self) -> bool:
        """Whether nobody can tell these from new ones."""
        return self._unshared.holds()

    def give(self, values: Sequence[torch.Tensor]) -> bool:
        """Gives every parameter its gradient; none may have one.

        Args:
            values: Of each flat shard, laid out as it is.

        Returns:
            Whether it was done; if not, somebody has changed the dtype or the shape of a gradient, and none was given.
        """
        torch.cat(tuple(values), out=self._whole)
        return give_gradients(self._parameters, self._gradients)


def _places(flats: Sequence[FlatShard]) -> list[ViewPlace]:
    """Where each parameter's part is in all of them one after the other."""
    places = []
    begin = 0
    for flat in flats:
        for slot in flat.slots:
            shape, strides, offset = slot.place
            places.append((shape, strides, begin + offset))
        begin += flat.leaf.numel()
    return places
