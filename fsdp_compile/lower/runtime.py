"""What runs around a compiled graph at every step: two look-ups per flat shard, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.record import Role, require, role_of
from fsdp_compile.parameters.flat import FlatShard
from fsdp_compile.parameters.integrity import check_inside_graph
from fsdp_compile.parameters.reads import in_forward

Compiled = Callable[[list[Any]], Any]


def flat_positions(step: StepGraph) -> list[int]:
    """Positions of the flat shards among a graph's inputs."""
    placeholders = step.graph.find_nodes(op="placeholder")
    return [index for index, node in enumerate(placeholders) if role_of(node) is Role.FLAT]


def arrivals(step: StepGraph) -> list[tuple[int, tuple[int, ...]]]:
    """Which slots a backward graph makes gradients for: position of the flat shard among its inputs, offsets."""
    placeholders = step.graph.find_nodes(op="placeholder")
    offsets: dict[tuple[str, str], int] = {}
    for node in step.nodes(Role.GRADIENT):
        record = require(node)
        for name, spec in zip(record.parameters, record.specs, strict=True):
            offsets[record.unit, name] = spec.offset
    found = []
    for index in flat_positions(step):
        flat = require(placeholders[index])
        mine = tuple(sorted(offsets[flat.unit, name] for name in flat.parameters if (flat.unit, name) in offsets))
        if mine:
            found.append((index, mine))
    return found


def check_views(compiled: Compiled, positions: Sequence[int]) -> Compiled:
    """Wraps a compiled forward that may be entered without the model's own `__call__`: from a compiled function."""

    def run(args: list[Any]) -> Any:
        if not in_forward():
            for index in positions:
                flat = FlatShard.of(args[index])
                if flat is not None:
                    check_inside_graph(flat)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def note_arrivals(compiled: Compiled, noted: Sequence[tuple[int, tuple[int, ...]]]) -> Compiled:
    """Wraps a compiled backward so that parameters without a gradient keep `None`."""

    def run(args: list[Any]) -> Any:
        for index, offsets in noted:
            flat = FlatShard.of(args[index])
            if flat is not None:
                flat.note_gradients(offsets)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
