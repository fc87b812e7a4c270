"""Small graphs written by hand, with a fake value on every node."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compile.ir.edit import infer_value
from fsdp_compile.ir.graph import Phase, StepGraph


class Sketch:
    """Writes a graph node by node."""

    def __init__(self, phase: Phase = Phase.FORWARD) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.phase = phase

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = infer_value(node)
        return node

    def done(self, *outputs: fx.Node) -> StepGraph:
        self.graph.output(outputs)
        return StepGraph(fx.GraphModule({}, self.graph), self.phase)
