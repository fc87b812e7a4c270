"""Changes to a planned graph without which Inductor's code would be slower, or communicate later than planned.

`keep_matmuls`: Inductor joins a matmul with an addition further below. The gradient of a tied embedding is such a sum.

    planned    start of a gather, %m = mm, wait, %n = mm(wait), %sum = %n + %m
    without    start of a gather, wait, %n = mm(wait), %sum = addmm(%n, ...)      nothing hides the gather

`write_before_waits`: Inductor casts where the cast is first read. The gradient of an embedding is cast by itself, and
as large as its table.

    planned    %sent = cast(%gradient), wait of another reduction, start of the reduction of %sent
    without    wait of another reduction, cast, start of the reduction, which is late

`call_lookups`: Inductor takes rows out of a table in each kernel that reads them, the last of which may be far below.

    planned    %x = embedding(%table, ...), reshard of %table, gathers, mm, %y = %x + %mm
    without    gathers, mm, %y = %table[...] + %mm      the table is in memory meanwhile

`open_dequantize`: as an operator, `dequantize` is several kernels, each of which writes its result to memory, in
float32 four times of what was sent: 19 bytes of traffic per element, and 3 as one kernel.

    %full = fsdp_compile.dequantize(%gathered, %scales, ...)   ->   views of both, cast, mul, cast
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate
from typing import cast

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.cost.fusion import WRITTEN, looks_up, shown_by
from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import STARTS, require, role_of
from fsdp_compile.layout.messages import cast as cast_to
from fsdp_compile.layout.messages import view
from fsdp_compile.layout.wire_formats import FORMATS
from fsdp_compile.lower.written_order import has_a_place
from fsdp_compile.ops.quantize import DEQUANTIZE

aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_ONE_BY_ONE = (_CAST, aten.div.Tensor, aten.mul.Tensor)


def keep_matmuls(graph: fx.Graph) -> None:
    """Puts two transpositions, which cost nothing, behind each matmul that must not move to the addition of its result.

    Those move past no other call, a matmul that is added to them aside, are left to Inductor.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    calls = list(accumulate(has_a_place(node) for node in nodes))  # how many there are up to each node
    for matmul in graph.find_nodes(op="call_function", target=aten.mm.default):
        users = list(matmul.users)
        if len(users) != 1 or users[0].target is not aten.add.Tensor:
            continue
        [add] = users
        added = [node for node in add.all_input_nodes if node.target is aten.mm.default and place[node] > place[matmul]]
        if calls[place[add]] - calls[place[matmul]] > len(added):
            with graph.inserting_before(add):
                turned = matmul
                for _ in range(2):
                    turned = graph.call_function(aten.permute.default, (turned, [1, 0]))
                    turned.meta["val"] = turned.all_input_nodes[0].meta["val"].t()
                add.replace_input_with(matmul, turned)


def write_before_waits(graph: fx.Graph) -> None:
    """Marks casts of messages that are to be computed before a wait; those that would take more memory are left."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    waits = [i for node, i in place.items() if node.target is collectives.wait_tensor.default]
    for start, started in place.items():
        if role_of(start) in STARTS:
            for message in start.all_input_nodes:
                sent = source = shown_by(message)
                while source.target in _ONE_BY_ONE and len(source.all_input_nodes) == 1:
                    source = shown_by(source.all_input_nodes[0])
                is_waited_for = bisect(waits, started) > bisect(waits, place[sent])
                if sent.target is _CAST and is_waited_for and result_bytes(sent) <= result_bytes(source):
                    sent.meta[WRITTEN] = True


def call_lookups(graph: fx.Graph) -> None:
    """Lets lookups be calls of their operator, in their place, by Inductor's own mark."""
    for node in filter(looks_up, graph.find_nodes(op="call_function", target=aten.embedding.default)):
        node.meta["should_fallback"] = True


def open_dequantize(graph: fx.Graph) -> None:
    """Replaces the operator wherever it is in a graph; the bits are the same."""
    for node in graph.find_nodes(op="call_function", target=DEQUANTIZE):
        gathered, scales = node.all_input_nodes
        wire, size, dtype = cast(tuple[str, int, torch.dtype], node.args[2:])
        with graph.inserting_before(node):
            b = GraphBuilder(graph, require(node), node)
            full = cast_to(b, FORMATS[wire].decoded(b, gathered, scales, size), dtype)
            full.meta[WRITTEN] = True  # in its place, as the operator, and once for all readers
            node.replace_all_uses_with(view(b, full, [b.value(full).numel()]))
        graph.erase_node(node)
