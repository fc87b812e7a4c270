"""Ranges in torch's profiler around the nodes of a graph that communicate, where it runs operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx

from fsdp_compile.ir.graph import Record, Role, record_of, require, role_of
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.runtime.units import FSDPParamGroup

_RANGES: Final = {
    Role.GATHER: Range.ALL_GATHER,
    Role.GATHER_WAIT: Range.ALL_GATHER_COPY_OUT,
    Role.COPY_OUT: Range.ALL_GATHER_COPY_OUT,
    Role.REDUCE: Range.REDUCE,
    Role.REPLICATE: Range.REDUCE,
    Role.REDUCE_WAIT: Range.REDUCE_WAIT,
    Role.REPLICATE_WAIT: Range.REDUCE_WAIT,
}


class ProfiledInterpreter(fx.Interpreter):
    """Runs a transformed graph once, with its ranges.

    Args:
        gm: The graph.
        args: What it is called with.
    """

    def __init__(self, gm: fx.GraphModule, args: Sequence[object]) -> None:
        super().__init__(gm)
        self._names = dict(_names(gm.graph, args))

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        record = record_of(n)
        if record is None or record.role not in _RANGES:
            return super().run_node(n)
        with profiled(_RANGES[record.role], self._units(record)):
            return super().run_node(n)

    def _units(self, record: Record) -> list[str]:
        return [self._names.get(unit, unit) for unit in record.units]


def _names(graph: fx.Graph, args: Sequence[object]) -> list[tuple[str, str]]:
    """The name of each unit among the inputs, by its title in the graph: layers of one shape share a graph."""
    inputs = zip(graph.find_nodes(op="placeholder"), args, strict=True)
    flats = [(require(node).unit, value) for node, value in inputs if role_of(node) is Role.FLAT]
    owners = [(unit, FSDPParamGroup.of(value)) for unit, value in flats if isinstance(value, torch.Tensor)]
    return [(unit, owner.unit.name) for unit, owner in owners if owner is not None]
