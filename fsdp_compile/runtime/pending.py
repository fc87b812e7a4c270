"""Flat shards with something left to do when a backward ends or the next forward starts.

Gradients that are owed, parameters that stay gathered, updates: most flat shards of most steps have none of it. Whoever
starts such a thing notes it here, so that steps need not look through all units for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_compile.runtime.units import FlatShard, Unit

_noted: weakref.WeakSet[FlatShard] = weakref.WeakSet()
_lock = threading.RLock()
"""Autograd runs hooks on a thread of each device, and models may be trained on several threads."""


def note(flat: FlatShard) -> None:
    """Says that there may be something left to do for a flat shard."""
    with _lock:
        _noted.add(flat)


def is_anything() -> bool:
    """Whether there is something left to do for any flat shard of the process."""
    with _lock:
        if _noted:
            for flat in [flat for flat in _noted if flat.is_settled]:
                _noted.discard(flat)
        return bool(_noted)


def among(units: Iterable[Unit]) -> Sequence[FlatShard]:
    """The flat shards of some units for which something is left to do, in the units' order: alike on all ranks."""
    with _lock:
        return [flat for unit in units for flat in unit.flats if flat in _noted] if is_anything() else []


def are_settled(flats: Iterable[FlatShard]) -> bool:
    """Whether nothing is left to do for any of some flat shards."""
    with _lock:
        return not is_anything() or _noted.isdisjoint(flats)
