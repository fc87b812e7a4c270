"""What is done when a backward pass has made all gradients: nothing may be left over that belongs to this step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fsdp_compile._torch import after_this_backward, backward_in_progress
from fsdp_compile.parameters import unsettled
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.unit import Unit

_expected: set[int] = set()
"""Outermost modules, by `id`, whose end is asked for in the backward pass `_of[0]`."""
_of = [-1]


def expect(flat: FlatShard) -> None:
    """Asks for the end of this backward pass to be noticed, once for all units of a model, if it has work to do.

    Args:
        flat: A flat shard that something was done for.
    """
    if _of[0] != backward_in_progress():
        _expected.clear()
        _of[0] = backward_in_progress()
    unsettled.note(flat)
    outermost = flat.unit.outermost
    assert outermost is not None
    if id(outermost) not in _expected and unsettled.is_anything():
        _expected.add(id(outermost))
        after_this_backward(functools.partial(_finish, flat.unit.of_model))


@torch.compiler.disable
def _finish(units: Sequence[Unit]) -> None:
    """Delivers and reduces what waited for this backward, unit by unit in the same order on every rank."""
    from fsdp_compile.parameters import handover, holding, keeping, updating  # they need this module
    from fsdp_compile.parameters.variants import publish

    waiting = [flat for flat in unsettled.among(units) if flat.owes_gradients]
    for flat in waiting:
        if any([flat.held.give_back(), flat.partial.give_back()]):
            publish(flat)
    for flat in waiting:
        if flat.unit.accumulation.last_backward:
            handover.hand_over(flat)
            holding.reduce_rest(flat)
            flat.progress.has_late = False
            updating.run(flat)
    keeping.after_backward(flat for flat in unsettled.among(units) if flat.unit.accumulation.last_backward)
