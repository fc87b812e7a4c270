"""Lets what a collective sends be computed in its place, where a wait stands between that and the start.

    %sent = cast(%gradient)                 Inductor casts where the cast is first read:
    wait of another reduction               after the wait, at the start of the reduction, which it delays
    start of the reduction of %sent

The gradient of an embedding is the one that this is for: it is cast by itself, and as large as its table.
"""

from __future__ import annotations

from bisect import bisect

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.cost.fusion import WRITTEN, shares_memory
from fsdp_compile.ir.graph import Role, role_of

_CAST = torch.ops.prims.convert_element_type.default
_ONE_BY_ONE = (_CAST, torch.ops.aten.div.Tensor, torch.ops.aten.mul.Tensor)
_STARTS = (Role.GATHER, Role.REDUCE, Role.REPLICATE)


def write_before_waits(graph: fx.Graph) -> None:
    """Marks casts of messages that are to be computed before a wait; those that would take more memory are left."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    waits = [i for node, i in place.items() if node.target is collectives.wait_tensor.default]
    for start, started in place.items():
        if role_of(start) in _STARTS:
            for message in start.all_input_nodes:
                sent = _behind_views(message)
                waited = bisect(waits, started) - bisect(waits, place[sent])
                if sent.target is _CAST and waited and _bytes(sent) <= _bytes(_source(sent)):
                    sent.meta[WRITTEN] = True


def _behind_views(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while node.op == "call_function" and shares_memory(node):
        node = node.all_input_nodes[0]
    return node


def _source(node: fx.Node) -> fx.Node:
    """The value in memory that a cast is computed from."""
    while node.target in _ONE_BY_ONE and len(node.all_input_nodes) == 1:
        node = _behind_views(node.all_input_nodes[0])
    return node


def _bytes(node: fx.Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return value.numel() * value.element_size()
