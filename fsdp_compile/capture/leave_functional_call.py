"""Leaves calls of sharded modules by `torch.func.functional_call` to Python: in a graph they would ignore the values.

It registers the values for the time of the call. In a graph a read is the marker of one place in a flat parameter, and
Dynamo does not compare what is registered with it, which would take a guard for each parameter. Around compiled code,
in uncompiled code and after a graph break the values are read. So the frame whose graph has such a call runs in Python,
and what it calls is compiled.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn.utils import stateless

from fsdp_compile._torch.dynamo import leave_to_python
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.source_line import frames_of, source_line
from fsdp_compile.ops.unshard import UNSHARD


def leave_functional_call(gm: fx.GraphModule) -> None:
    """Leaves a frame to Python if `functional_call` in its Dynamo graph calls what reads a sharded parameter.

    Raises:
        UnsupportedModelError: Where `fullgraph=True` was asked for.
        Exception: Elsewhere, the one that tells Dynamo to leave the frame.
    """
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target in (torch.ops.fsdp_compile.unshard, UNSHARD):
                    _leave_inside(node)


def _leave_inside(read: fx.Node) -> None:
    inside = [frame for frame in frames_of(read) if frame.file == stateless.__file__]
    # Reads before the call only find out which parameters are tied.
    if not inside or inside[-1].function != "_functional_call":
        return
    what = "torch.func.functional_call() of a sharded module is compiled, where the given values would be ignored"
    where = source_line(read, that_calls=stateless.__file__)
    raise leave_to_python(f"fsdp_compile: {what} ({where})") or UnsupportedModelError(
        what,
        where=where,
        instead="fullgraph=False, or functional_call() in a function under @torch.compiler.disable",
    )
