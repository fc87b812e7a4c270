"""Sizes in a planned graph as expressions of ranks, batch and sequence.

Nodes of the model have the expressions of the trace. Those that passes inserted have a record: so many elements per
rank for each slot, on one rank or on all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from operator import getitem
from typing import Any, Final

import sympy
import torch
from torch import fx

from fsdp_compile.cost.sizes import Sizes, tensor_bytes, tensors_of, tensors_of_value
from fsdp_compile.explain.trace.open_sizes import OPEN, OpenSizes
from fsdp_compile.ir.graph import Record, Role, record_of, role_of
from fsdp_compile.layout.flat_layout import aligned_numel
from fsdp_compile.layout.spec import UnshardSpec

RANKS: Final = sympy.Symbol("ranks", integer=True, positive=True)
"""Ranks that share the parameters, N."""
_ITEMS = (Role.GATHER_ITEM, Role.REDUCE_ITEM)


def extent(spec: UnshardSpec, stored: torch.dtype) -> sympy.Expr:
    """Elements of a parameter's slot on each rank, as `layout/flat_layout.py` rounds them.

    `stored` is the dtype of its flat parameter.
    """
    return _extent(spec.shape, spec.dim, aligned_numel(stored, spec.param_dtype, spec.reduce_dtype))


@functools.cache
def _extent(shape: tuple[int, ...], dim: int | None, step: int) -> sympy.Expr:
    if dim is None:
        return sympy.Integer(step)
    others = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    numel = sympy.ceiling(sympy.Integer(shape[dim]) / RANKS) * others
    return step * sympy.Max(sympy.ceiling(numel / step), 1)


class OpenGraphSizes(Sizes):
    """Sizes of one region's graphs as expressions."""

    def __init__(self, sizes_of: OpenSizes, stored: Mapping[tuple[str, str], torch.dtype], ranks: int) -> None:
        """Reads sizes.

        Args:
            sizes_of: What the symbols of the trace mean.
            stored: Dtype of the flat parameter of each parameter, by unit and name.
            ranks: For which the graphs were planned.
        """
        self._sizes_of = sizes_of
        self._stored = stored
        self._ranks = ranks
        self._known: dict[fx.Node, list[Any]] = {}

    def values(self, value: Any) -> Any:
        """What formulas of FLOPs are given for an argument: a fake tensor with open sizes."""
        return _open_value(value) if isinstance(value, fx.Node) else value

    def number(self, size: Any) -> Any:
        """One size."""
        return self._sizes_of.expression(size)

    def pieces(self, node: fx.Node) -> list[Any]:
        """Bytes of each tensor among a node's results."""
        if node not in self._known:
            self._known[node] = self._pieces(node)
        return self._known[node]

    def _pieces(self, node: fx.Node) -> list[Any]:
        if record_of(node) is None:
            tensors = tensors_of_value(_open_value(node))
            return [sympy.expand(tensor_bytes(tensor, self.number)) for tensor in tensors]
        tensors = tensors_of(node)
        records = {}
        if len(tensors) > 1:
            records = {u.args[1]: record_of(u) for u in node.users if u.target is getitem and role_of(u) in _ITEMS}
        return [self._of_slots(records.get(i) or record_of(node), tensor) for i, tensor in enumerate(tensors)]

    def _of_slots(self, record: Record | None, tensor: torch.Tensor) -> Any:
        """Bytes of a tensor of ours: slots on one rank, slots on all ranks, or a full parameter."""
        assert record is not None
        here = tensor_bytes(tensor)
        slots = zip(record.claims, record.specs, strict=True)
        one = sympy.Add(*(extent(spec, self._stored[claim]) for claim, spec in slots)) * tensor.element_size()
        on_one = one.subs(RANKS, self._ranks)
        if here == on_one:
            return one
        if here == on_one * self._ranks:
            return sympy.expand(one * RANKS)
        return sympy.Integer(here)


def stored_dtypes(steps: Iterable[fx.Graph]) -> dict[tuple[str, str], torch.dtype]:
    """Dtype of the flat parameter of each parameter that graphs read."""
    found = {}
    for graph in steps:
        for node in graph.find_nodes(op="placeholder"):
            record = record_of(node)
            if record is not None and record.role is Role.FLAT:
                found.update(dict.fromkeys(record.claims, node.meta["val"].dtype))
    return found


def _open_value(node: fx.Node) -> Any:
    return node.meta.get(OPEN, node.meta.get("val"))
