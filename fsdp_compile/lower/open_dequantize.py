"""Writes out `dequantize`, so that Inductor makes one kernel of it: 3 bytes of traffic per element, and not 19.

    %full = fsdp_compile.dequantize(%gathered, %scales, ...)   ->   views of both, cast, mul, cast

As an operator it is several kernels, each of which writes its result to memory, in float32 four times of what was sent.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import fx

from fsdp_compile.cost.fusion import WRITTEN
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import require
from fsdp_compile.layout.messages import cast as cast_to
from fsdp_compile.layout.messages import view
from fsdp_compile.layout.wire_formats import FORMATS
from fsdp_compile.ops.quantize import DEQUANTIZE


def open_dequantize(graph: fx.Graph) -> None:
    """Replaces the operator wherever it is in a graph; the bits are the same."""
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        with graph.inserting_before(node):
            node.replace_all_uses_with(_opened(GraphBuilder(graph, require(node), node), node))
        graph.erase_node(node)


def _opened(b: GraphBuilder, node: fx.Node) -> fx.Node:
    gathered, scales = node.all_input_nodes
    wire, size, dtype = cast(tuple[str, int, torch.dtype], node.args[2:])
    full = cast_to(b, FORMATS[wire].decoded(b, gathered, scales, size), dtype)
    full.meta[WRITTEN] = True  # in its place, as the operator, and once for all readers
    return view(b, full, [b.value(full).numel()])
