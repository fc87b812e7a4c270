"""Compiles a planned graph in segments, each kind of them once: layers that are alike share their code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.dynamo import given_output_strides
from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.lower.run_segments import runner
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
    parts: list[tuple[Segment, Compiled] | fx.Node] = []
    (output,) = gm.graph.find_nodes(op="output")
    with given_output_strides([_strides(value) for value in output.args[0]]):
        for part in cut(gm.graph):
            if isinstance(part, fx.Node):
                parts.append(part)
                continue
            text = text_of(part)
            if text not in known:
                known[text] = compile_one(graph_of(part, gm), [node.meta["val"] for node in part.inputs])
            parts.append((part, known[text]))
    return runner(gm.graph, parts)


def _strides(value: Any) -> tuple[int, ...] | None:
    made = value.meta.get("val") if isinstance(value, fx.Node) else None
    return made.stride() if isinstance(made, torch.Tensor) else None
