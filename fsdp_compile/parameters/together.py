"""Small gradients that one compiled backward makes: one goes through autograd, and the others wait for it outside.

    %g0, %g1, ... %g39 of a graph  ->  autograd accumulates %g0, and its hook hands all of them over at once

What autograd and a hook do for each of many small flat shards would take longer than all that is done for their
parameters. That the first gradient arrives says that this backward accumulates gradients, for the others too, and
that nothing asks for their history.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fsdp_compile._torch import backward_in_progress, has_dispatch_modes, lack_gradients, lack_hooks
from fsdp_compile.parameters import unsettled
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.gradient_views import GradientViews

_PLAIN = {torch.Tensor}


class Together:
    """Flat shards of one model, with small gradients of one dtype and device, that one graph makes gradients of.

    Attributes:
        flats: The flat shards; the first one's gradient goes through autograd.
        parameters: All of theirs.
        views: What the parameters were given as gradients, if it may be given again.
    """

    def __init__(self, flats: Sequence[FlatShard]) -> None:
        self.flats = tuple(flats)
        self.parameters = [slot.parameter for flat in flats for slot in flat.slots]
        self.views: GradientViews | None = None
        # A parameter that is tied over units gets the sum.
        self._differ = len(set(map(id, self.parameters))) == len(self.parameters)

    @staticmethod
    def of(flats: Sequence[FlatShard]) -> Together:
        """The same as in the last step, where these flat shards were together then."""
        known = flats[0].together
        if known is not None and known.flats == tuple(flats):
            return known
        for flat in flats:
            forget(flat)
        made = Together(flats)
        for flat in flats:
            flat.together = made
        return made

    def may_wait(self) -> bool:
        """Whether gradients may reach all parameters at once, and after this nothing else has to be done for them.

        Not where parameters have hooks: two graphs may make gradients of one parameter, and its hooks are called once,
        with the sum.
        """
        return (
            self._differ
            and not _is_awaited(self.flats[0])
            and unsettled.are_settled(self.flats)
            and not has_dispatch_modes()
            and lack_hooks(self.parameters)
        )

    def wait(self, gradients: Sequence[torch.Tensor]) -> None:
        """Keeps gradients until the first flat shard's own has been accumulated.

        Args:
            gradients: Of all flat shards but the first.
        """
        self.flats[0].waiting = Waiting(backward_in_progress(), self, tuple(gradients))

    def give(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Gives all parameters their gradients, unless one has a gradient already.

        Args:
            gradients: Of each flat shard, laid out as it is.

        Returns:
            Whether it was done.
        """
        if has_dispatch_modes() or not lack_gradients(self.parameters):
            return False
        if self.views is not None and self.views.may_be_given() and self.views.give(gradients):
            return True
        self.views = GradientViews(self.flats, self.parameters)
        return self.views.give(gradients)


@dataclasses.dataclass(frozen=True, eq=False)
class Waiting:
    """Gradients that wait for the first flat shard's.

    Attributes:
        backward: The backward pass that has made them.
        together: Whose they are.
        gradients: Of all flat shards but the first.
    """

    backward: int
    together: Together
    gradients: tuple[torch.Tensor, ...]


def take(first: FlatShard) -> Waiting | None:
    """What waits for a flat shard's gradient; what another backward left behind that failed is forgotten."""
    waiting = first.waiting if _is_awaited(first) else None
    first.waiting = None
    return waiting


def _is_awaited(first: FlatShard) -> bool:
    return first.waiting is not None and first.waiting.backward == backward_in_progress()


def are_plain(gradients: Sequence[object]) -> bool:
    """Whether a graph has made all of some gradients, as tensors like any other."""
    return _PLAIN.issuperset(map(type, gradients))


def forget(flat: FlatShard) -> None:
    """Frees what is kept for a flat shard, and for others together with it."""
    if flat.together is not None:
        for each in flat.together.flats:
            each.together = None
