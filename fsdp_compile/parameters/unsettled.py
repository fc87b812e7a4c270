"""Flat shards with something left to do when a backward ends or the next forward starts.

Gradients that are owed, parameters that stay gathered, updates: most flat shards of most steps have none of it. Whoever
starts such a thing notes it here, so that steps need not look through all units for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_compile.parameters.flat import FlatShard
    from fsdp_compile.parameters.unit import Unit

_noted: weakref.WeakSet[FlatShard] = weakref.WeakSet()


def note(flat: FlatShard) -> None:
    """Says that there may be something left to do for a flat shard."""
    _noted.add(flat)


def is_anything() -> bool:
    """Whether there is something left to do for any flat shard of the process."""
    _forget_settled()
    return bool(_noted)


def among(units: Iterable[Unit]) -> Sequence[FlatShard]:
    """The flat shards of some units for which something is left to do, in the units' order: alike on all ranks."""
    return [flat for unit in units for flat in unit.flats if flat in _noted] if is_anything() else []


def are_settled(flats: Iterable[FlatShard]) -> bool:
    """Whether nothing is left to do for any of some flat shards."""
    return not is_anything() or _noted.isdisjoint(flats)


def _forget_settled() -> None:
    if _noted:
        for flat in [flat for flat in _noted if flat.is_settled]:
            _noted.discard(flat)
