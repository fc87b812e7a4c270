"""Which units' parameters stay gathered between calls: by hand, or between the microbatches of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_compile._torch import backward_in_progress
from fsdp_compile.parameters import epilogue, kept, unsettled, updating
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.unit import Unit
from fsdp_compile.parameters.variants import publish


class UnshardHandle:
    """All-gathers that `unshard(async_op=True)` started."""

    def __init__(self, flats: Iterable[FlatShard]) -> None:
        self._flats = list(flats)

    def wait(self) -> None:
        """Waits until the parameters are there; the next forward takes them. Waiting again does nothing."""
        for flat in self._flats:
            _settle(flat)


def unshard(units: Iterable[Unit]) -> UnshardHandle:
    """Starts to gather the parameters of units, those that are not there already.

    Returns:
        A handle; the next forward of the model waits by itself.
    """
    flats = [flat for unit in units if unit.policy.size > 1 for flat in unit.flats]
    for flat in flats:
        if flat.arriving is None and not _is_fresh(flat):
            flat.arriving = kept.start(flat)
            unsettled.note(flat)
            if backward_in_progress() != -1:
                epilogue.expect(flat)
    return UnshardHandle(flats)


def _settle(flat: FlatShard) -> None:
    if flat.arriving is not None:
        flat.kept, flat.arriving = kept.finish(flat, flat.arriving), None
        publish(flat)


def reshard(units: Iterable[Unit]) -> None:
    """Frees the gathered parameters of units."""
    for unit in units:
        for flat in unit.flats:
            if flat.arriving is not None:
                _settle(flat)  # memory may not be freed while it is written
            if flat.kept is not None:
                flat.kept = None
                publish(flat)


def before_forward(units: Iterable[Unit]) -> None:
    """Sees to it that what is kept of units is what their parameters are now, and gathers what is to be kept."""
    is_repeated = backward_in_progress() != -1  # by activation checkpointing; nobody has written since
    is_trained = torch.is_grad_enabled()
    for flat in unsettled.among(units):
        if flat.arriving is not None:
            _settle(flat)
        if is_repeated:
            continue
        updating.begin(flat)
        keeps = is_trained and flat.unit.keeps_parameters and flat.unit.policy.size > 1
        if keeps if flat.kept is None else is_stale(flat):
            refresh(flat)


def refresh(flat: FlatShard) -> None:
    """Gathers all parameters of a flat shard, and keeps them."""
    flat.kept = kept.finish(flat, kept.start(flat))
    publish(flat)


def is_stale(flat: FlatShard) -> bool:
    """Whether what is kept of a flat shard has been overtaken by its parameters."""
    return flat.kept is not None and not _is_fresh(flat)


def after_backward(flats: Iterable[FlatShard]) -> None:
    """Frees what need not be kept any longer of some flat shards."""
    held = [flat for flat in flats if flat.kept is not None or flat.arriving is not None]
    reshard(unit for unit in dict.fromkeys(flat.unit for flat in held) if not unit.keeps_parameters)


def _is_fresh(flat: FlatShard) -> bool:
    return flat.kept is not None and flat.kept.stamp == kept.stamp(flat)
