"""Values without elements are partitioned as values with elements are.

A rank without rows has activations of no bytes. To save them costs nothing, so the min-cut partitioner would save them
where other ranks compute theirs again, and backward would gather other parameters than theirs. While a graph is
partitioned, each has the size that it has for an input of one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import fx

from fsdp_compile.cost.sizes import concrete
from fsdp_compile.ir.queries import is_alias


@contextmanager
def counted(graph: fx.Graph) -> Iterator[dict[torch.Tensor, torch.Tensor]]:
    """Gives empty values a size in the block; yields what stands in the place of each, for copies of the nodes."""
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    rows: dict[fx.Node, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not any(map(_is_empty, value.shape)):
            continue
        source = next((one for one in node.all_input_nodes if one in rows), None)
        row = math.prod(concrete(size) for size in value.shape if not _is_empty(size))  # the other dimensions
        rows[node] = 1 if source is None else rows[source]
        if source is not None and is_alias(node):  # the same elements, in other rows
            rows[node] = max(1, source.meta["val"].numel() // row)
        node.meta["val"] = value.new_empty([rows[node] * row])
        stand_ins[node.meta["val"]] = value
    try:
        yield stand_ins
    finally:
        restore(graph.nodes, stand_ins)


def restore(nodes: Iterable[fx.Node], stand_ins: dict[torch.Tensor, torch.Tensor]) -> None:
    """Gives nodes their own values back."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value in stand_ins:
            node.meta["val"] = stand_ins[value]


def _is_empty(size: object) -> bool:
    return isinstance(size, int) and size == 0  # an open size is never compared, which would be a guard
