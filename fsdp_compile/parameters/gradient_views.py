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

import torch
from torch import nn

from fsdp_compile._torch import (
    Unshared,
    give_gradients,
    has_dispatch_modes,
    lack_gradients_and_hooks,
    make_dtensors,
    views_of,
)
from fsdp_compile.parameters.flat import FlatShard


class GradientViews:
    """What the parameters of some flat shards are given as gradients, all of one dtype and device.

    Args:
        flats: The flat shards, which have small gradients.
    """

    def __init__(self, flats: Sequence[FlatShard]) -> None:
        self.flats = tuple(flats)
        self.parameters = _parameters(flats)
        leaf = flats[0].leaf
        # Memory of its own, since a gradient may share its memory with others that a graph has made.
        self._whole = torch.empty(sum(flat.leaf.numel() for flat in flats), dtype=leaf.dtype, device=leaf.device)
        views = views_of(self._whole, self._places())
        self._gradients = make_dtensors(views, self.parameters)
        self._unshared = Unshared(self._whole, views, self._gradients)

    def _places(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        places = []
        begin = 0
        for flat in self.flats:
            for slot in flat.slots:
                shape, strides, offset = slot.place
                places.append((shape, strides, begin + offset))
            begin += flat.leaf.numel()
        return places

    def may_be_given(self) -> bool:
        """Whether nobody can tell these from new ones."""
        return self._unshared.holds()

    def give(self, values: Sequence[torch.Tensor]) -> None:
        """Gives every parameter its gradient; none may have one.

        Args:
            values: Of each flat shard, laid out as it is.
        """
        torch.cat(tuple(values), out=self._whole)
        give_gradients(self.parameters, self._gradients)


def give(flats: Sequence[FlatShard], values: Sequence[torch.Tensor]) -> bool:
    """Gives all parameters of some flat shards their gradients, unless one has a gradient already, or a hook.

    Args:
        flats: With small gradients, of one dtype and device.
        values: For each, a gradient that covers all of its slots.

    Returns:
        Whether it was done.
    """
    views = flats[0].gradient_views
    fits = views is not None and views.flats == tuple(flats)
    parameters = views.parameters if views is not None and fits else _parameters(flats)
    if has_dispatch_modes() or not lack_gradients_and_hooks(parameters):
        return False
    if views is None or not fits or not views.may_be_given():
        if len(set(map(id, parameters))) < len(parameters):
            return False  # one is tied over units: it gets the sum
        for flat in flats:
            forget(flat)
        views = GradientViews(flats)
        for flat in flats:
            flat.gradient_views = views
    views.give(values)
    return True


def forget(flat: FlatShard) -> None:
    """Frees what is kept for a flat shard, and for others together with it."""
    if flat.gradient_views is not None:
        for each in flat.gradient_views.flats:
            each.gradient_views = None


def _parameters(flats: Sequence[FlatShard]) -> list[nn.Parameter]:
    return [slot.parameter for flat in flats for slot in flat.slots]
