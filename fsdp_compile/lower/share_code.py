"""Compiles a planned graph in segments, each kind of them once, and runs it: layers that are alike share their code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.dynamo import compiled_in_parts
from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.lower.eager import boxed
from fsdp_compile.lower.segments import Segment, cut, graph_of, has_open_sizes, text_of

CompileOne = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


def can_share_code(graph: fx.Graph) -> bool:
    """Whether a graph can be compiled in segments: its sizes are numbers, and only tensors go between them."""
    crossing = [node for part in cut(graph) if isinstance(part, Segment) for node in (*part.inputs, *part.outputs)]
    return not has_open_sizes(graph) and all(isinstance(node.meta.get("val"), torch.Tensor) for node in crossing)


def compile_segments(gm: fx.GraphModule, compile_one: CompileOne) -> Compiled:
    """Compiles a graph for which `can_share_code` holds.

    Args:
        gm: After all passes.
        compile_one: Compiles a graph for inputs of these types.
    """
    known: dict[str, Compiled] = {}
    codes: dict[fx.Node, Compiled] = {}
    whole = fx.Graph()
    copies = {node: whole.node_copy(node) for node in gm.graph.find_nodes(op="placeholder")}
    (output,) = gm.graph.find_nodes(op="output")
    results = [value.meta.get("val") if isinstance(value, fx.Node) else None for value in output.args[0]]
    with compiled_in_parts([made.stride() if isinstance(made, torch.Tensor) else None for made in results]):
        for part in cut(gm.graph):
            if isinstance(part, fx.Node):
                copies[part] = whole.node_copy(part, copies.__getitem__)
                continue
            segment, inputs = graph_of(part, gm), [node.meta["val"] for node in part.inputs]
            text = text_of(segment, inputs)
            if text not in known:
                known[text] = compile_one(segment, inputs)
            call = whole.call_module("segment", tuple(copies[node] for node in part.inputs))
            codes[call] = known[text]
            copies |= {node: whole.call_function(getitem, (call, i)) for i, node in enumerate(part.outputs)}
    whole.node_copy(output, copies.__getitem__)
    return boxed(_Runner(gm, whole, codes))


class _Runner(fx.Interpreter):
    """Runs operators as they are, and the code of segments, which alone holds what is read for the last time."""

    def __init__(self, gm: fx.GraphModule, graph: fx.Graph, codes: Mapping[fx.Node, Compiled]) -> None:
        super().__init__(gm, graph=graph)
        self._codes = codes

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; the result is dropped if nothing reads it, as that of a wait."""
        if n in self._codes:
            arguments = [self.env[node] for node in n.all_input_nodes]
            self.env.update(dict.fromkeys(self.user_to_last_uses.get(n, ())))
            return self._codes[n](arguments)
        made = getattr(self, n.op)(n.target, *self.fetch_args_kwargs_from_env(n))
        return made if n.users or n.op == "output" else None
