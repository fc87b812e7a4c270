"""Private names by which Dynamo intercepts the Python frames that a thread enters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame
from torch._dynamo.eval_frame import skip_code

Compiler = Callable[..., Any]
"""What compiles frames: a backend with its settings."""


def compiler_of_calls() -> Compiler | None:
    """What compiles the frames that this thread enters, if Dynamo intercepts them."""
    callback = get_eval_frame_callback()
    return callback if callable(callback) else None


def call_compiled_by(compiler: Compiler, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function whose frames are compiled by what `compiler_of_calls` returned before, maybe on another thread.

    The function's own frame is one of them.
    """
    before = set_eval_frame(compiler)
    try:
        return function(*args)
    finally:
        set_eval_frame(before)


skip_code(call_compiled_by.__code__)
