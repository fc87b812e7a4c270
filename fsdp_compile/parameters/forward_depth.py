"""Whether code runs inside the forward of a sharded module that nobody compiles: there, reads gather by themselves."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

from fsdp_compile._torch import skip_code

_forward_depth = threading.local()
_first_call = threading.local()


def in_forward() -> bool:
    """Whether this thread is inside the forward of a sharded module that runs eagerly."""
    return getattr(_forward_depth, "value", 0) > 0 or _in_first_call()


def in_forward_until_return(frame: types.FrameType | None) -> None:
    """Counts as inside a forward until `frame` returns.

    The first call of a plain model entered its forward before there was anything sharded, so nothing has raised the
    depth for what is left of it.
    """
    _first_call.frame = frame


def _in_first_call() -> bool:
    waited_for = getattr(_first_call, "frame", None)
    if waited_for is None:
        return False
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame is not waited_for:
        frame = frame.f_back
    if frame is None:
        _first_call.frame = None
    return frame is not None


def call_in_forward(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `function` so that reads of managed parameters in it gather."""
    _forward_depth.value = getattr(_forward_depth, "value", 0) + 1
    try:
        return function(*args, **kwargs)
    finally:
        _forward_depth.value -= 1


skip_code(call_in_forward.__code__)
