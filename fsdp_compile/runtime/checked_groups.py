"""What the running forward has checked: parameter groups and models, before the first module in it that reads them.

A forward checks what lies below the module that was called first. That module may call others which it does not own (a
list hides a teacher from `parameters()`); these are found by what is missing here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from fsdp_compile.runtime.units import FSDPParamGroup, ModelState

_running = threading.local()


def note(groups: Iterable[FSDPParamGroup], models: Iterable[ModelState]) -> None:
    """Notes that the running forward has checked some parameter groups, and the models that they are parts of."""
    checked().update(groups, models)


def checked() -> set[FSDPParamGroup | ModelState]:
    """All that the running forward has checked."""
    found: set[FSDPParamGroup | ModelState] = _running.__dict__.setdefault("checked", set())
    return found


def forget() -> None:
    """Ends a forward: the next one checks everything anew."""
    _running.__dict__.clear()
