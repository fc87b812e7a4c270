"""The frame that Dynamo traces on this thread, and what a backend can ask of Dynamo about it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import SkipFrame
from torch._guards import TracingContext

_FORWARDS = frozenset({"forward", "_call_impl", "_wrapped_call_impl", "__call__"})
"""Names of the functions in which a forward runs."""
_COND_FILE = sys.modules["torch._higher_order_ops.cond"].__file__  # a function of that name hides the module


def root_translator() -> Any:
    """What traces the frame; `None` if this thread runs neither Dynamo nor a backend that it has called."""
    try:
        return symbolic_convert.InstructionTranslator.current_tx()
    except AttributeError:
        return None


def leave_to_python(why: str) -> Exception | None:
    """The exception that makes Dynamo run the current frame, and later ones of its code, in Python.

    What the frame calls is compiled all the same.

    Args:
        why: For Dynamo's logs.

    Returns:
        `None` if Dynamo was asked for one graph (`fullgraph=True`).
    """
    translator = root_translator()
    if translator is None or translator.one_graph or translator.error_on_graph_break:
        return None
    return SkipFrame(why)


def leave_while_traced(_: object) -> None:
    """For `comptime` in traced code: leaves the frame to Python, from its start, if that is allowed."""
    why = leave_to_python("fsdp_compile: a sharded parameter is replaced by a tensor")
    if why is not None:
        raise why


def is_compiling_a_frame() -> bool:
    """Whether this thread runs Dynamo or a backend that it has called."""
    return root_translator() is not None


def is_tracing_python() -> bool:
    """Whether Dynamo is tracing the user's code on this thread; what a backend traces after it does not count."""
    translator = root_translator()
    return translator is not None and not translator.output.should_exit


def is_in_eager_cond() -> bool:
    """Whether Dynamo traces the branches of a `torch.cond` that uncompiled code calls."""
    translator = root_translator()
    return translator is not None and translator.output.root_tx.f_code.co_filename == _COND_FILE


@torch.compiler.assume_constant_result  # type: ignore[no-untyped-call, unused-ignore]
def traces_a_forward() -> bool:
    """Whether what Dynamo traces here is a part of a module's forward; for code that it traces."""
    if any(frame.name in _FORWARDS for frame in TracingContext.extract_stack()):
        return True
    frame = sys._getframe().f_back
    while frame is not None:
        if frame.f_code.co_name in _FORWARDS and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False
