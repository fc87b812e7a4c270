"""Parameter groups with something left to do when a backward ends or the next forward starts.

Gradients that are owed, parameters that stay gathered, updates: most parameter groups of most steps have none of it.
Whoever starts such a thing notes it here, so that steps need not look through all units for it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_compile.runtime.units import FSDPParamGroup, FSDPUnit

_pending: weakref.WeakSet[FSDPParamGroup] = weakref.WeakSet()
_lock = threading.RLock()
"""Autograd runs hooks on a thread of each device, and models may be trained on several threads."""


def mark_pending(group: FSDPParamGroup) -> None:
    """Says that there may be something left to do for a parameter group."""
    with _lock:
        _pending.add(group)


def is_any_pending() -> bool:
    """Whether there is something left to do for any parameter group of the process."""
    with _lock:
        if _pending:
            for group in [group for group in _pending if group.is_idle]:
                _pending.discard(group)
        return bool(_pending)


def pending_in(units: Iterable[FSDPUnit]) -> Sequence[FSDPParamGroup]:
    """The parameter groups of some units for which something is left to do, in the units' order: alike on all ranks."""
    with _lock:
        return [group for unit in units for group in unit.param_groups if group in _pending] if is_any_pending() else []


def are_idle(groups: Iterable[FSDPParamGroup]) -> bool:
    """Whether nothing is left to do for any of some parameter groups."""
    with _lock:
        return not is_any_pending() or _pending.isdisjoint(groups)
