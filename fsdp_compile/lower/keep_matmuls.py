"""Keeps matmuls where the graph has them, where Inductor would join them with an addition further below.

    planned    start of a gather, %m = mm, wait, %n = mm(wait), %sum = %n + %m
    without    start of a gather, wait, %n = mm(wait), %sum = addmm(%n, ...)      nothing hides the gather
    with       as planned

The gradient of a tied embedding is such a sum. Inductor does the same to the sum of two matmuls.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import fx

from fsdp_compile.lower.written_order import has_a_place

aten = torch.ops.aten


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
                add.replace_input_with(matmul, _transposed(_transposed(matmul)))


def _transposed(matrix: fx.Node) -> fx.Node:
    transposed = matrix.graph.call_function(aten.permute.default, (matrix, [1, 0]))
    transposed.meta["val"] = matrix.meta["val"].t()
    return transposed
