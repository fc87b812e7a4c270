"""Finds reads of `.grad` in compiled code, by `clip_grad_norm_` and `zero_grad` too, which would find no gradient.

Compiled code reads gathered parameters, results of an operator, and Dynamo answers `.grad` of such by itself: `None`,
or something that is not `None` and has no value. Of `id()` it gives each read a number of its own. None of this leaves
anything in the graph. What tells are the lines that read the parameters:

- the user's function around one reads some `.grad`, or calls `id()`;
- outside of forwards, nothing uses what is read. (In a forward, code may ask a parameter for its dtype alone.)

Outside of forwards Python finds sharded parameters with their gradients, so there it runs the compiled function. So it
does wherever `id()` is called, since what such a function reads is one object in a forward that Python runs. In
forwards, reads of `.grad` are refused, as both are where `fullgraph=True` was asked for.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from typing import NamedTuple

import torch
from torch import fx

from fsdp_compile._torch.tracing import leave_to_python
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.source_line import Frame, source_frame, source_line
from fsdp_compile.modules.forward import in_forward
from fsdp_compile.ops.unshard import UNSHARD

_TORCHS_LAYERS = "torch.nn.modules."
_HAVE_A_FUNCTION_GRAD = ("autograd", "func")
"""Modules of torch whose `grad` computes gradients."""
_ASKS = re.compile(r"\.\s*grad\b|\bid\s*\(")


def refuse_gradient_reads(gm: fx.GraphModule) -> None:
    """Refuses a Dynamo graph whose program reads the `.grad` of sharded parameters, or leaves its frame to Python.

    Raises:
        UnsupportedModelError: In a forward, with the user's line that reads the parameter.
        Exception: Outside of forwards, the one that tells Dynamo to leave the frame.
    """
    parts = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]
    found = [
        node for part in parts for node in part.graph.nodes if node.target in (torch.ops.fsdp_compile.unshard, UNSHARD)
    ]
    frames = {node: source_frame(node) for node in found if not _is_of_torchs_layer(node)}
    asks = {frame: _function_of(frame) for frame in frames.values() if frame is not None}
    for node in found:
        frame = frames.get(node)
        function = None if frame is None else asks[frame]
        if function is not None and function.reads_gradient:
            raise _left_or_refused(
                "a compiled function reads parameters and some .grad: a gathered parameter has no gradient",
                source_line(node),
                _INSTEAD,
            )
        if function is not None and function.asks_id:
            what, where = f"{_CALLS_ID}: each read of a parameter is another object to it", source_line(node)
            raise _left(what, where) or UnsupportedModelError(
                what,
                where=where,
                instead="one.weight is other.weight, which is answered as in one process, names of parameters, or "
                "fullgraph=False",
            )
        # Of the outermost module's forward, Dynamo notes nothing at a node.
        if not node.users and not node.meta.get("nn_module_stack") and not in_forward():
            raise _left_or_refused(
                "compiled code outside of a forward goes through parameters and computes nothing with them, as "
                "clip_grad_norm_(), zero_grad() and reads of .grad do: it would find no gradients",
                source_line(node),
                _INSTEAD,
            )


_CALLS_ID = "a compiled function reads parameters and calls id()"
_INSTEAD = (
    "compile the forward and the loss alone, and use gradients after backward() in code that is not compiled "
    "(@torch.compiler.disable, outside of forwards)"
)


def _left_or_refused(what: str, where: str, instead: str) -> Exception:
    left = None if in_forward() else _left(what, where)
    return left or UnsupportedModelError(what, where=where, instead=instead)


def _left(what: str, where: str) -> Exception | None:
    return leave_to_python(f"fsdp_compile: {what} ({where})")


def _is_of_torchs_layer(read: fx.Node) -> bool:
    """Whether a forward of torch's own reads the parameter, and no function of the user's."""
    stack = list((read.meta.get("nn_module_stack") or {}).values())
    return bool(stack) and str(getattr(stack[-1][1], "__module__", stack[-1][1])).startswith(_TORCHS_LAYERS)


class _Function(NamedTuple):
    """What a function of the user's asks for.

    Attributes:
        reads_gradient: Whether it has `x.grad` for its value.
        asks_id: Whether it calls `id()`.
    """

    first_line: int
    last_line: int
    reads_gradient: bool
    asks_id: bool


def _function_of(frame: Frame) -> _Function | None:
    """The function of a frame, as far as its source is known."""
    source = "".join(linecache.getlines(frame.file))
    if not _ASKS.search(source):
        return None
    around = [function for function in _functions(source) if function.first_line <= frame.line <= function.last_line]
    return min(around, key=lambda function: function.last_line - function.first_line, default=None)


@functools.lru_cache(maxsize=16)
def _functions(source: str) -> tuple[_Function, ...]:
    """The functions of a file; recompiles ask for the same one again and again."""
    return tuple(
        _Function(node.lineno, node.end_lineno or node.lineno, _has_gradient(node), _calls_id(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    )


def _has_gradient(function: ast.AST) -> bool:
    inside = list(ast.walk(function))
    called = {node.func for node in inside if isinstance(node, ast.Call)}
    return any(_is_gradient(node) for node in inside if node not in called)


def _calls_id(function: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == "id" for called in calls)


def _is_gradient(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr != "grad" or not isinstance(node.ctx, ast.Load):
        return False
    return getattr(node.value, "attr", getattr(node.value, "id", "")) not in _HAVE_A_FUNCTION_GRAD
