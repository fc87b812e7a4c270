"""What runs around a compiled graph at every step: two look-ups per flat shard, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.record import Role, require
from fsdp_compile.parameters.flat import FlatShard

Compiled = Callable[[list[Any]], Any]


def arrivals(step: StepGraph) -> list[tuple[int, tuple[int, ...]]]:
    """For each flat shard that a backward graph makes a gradient for: its input's position, the offsets that get one."""
    offsets: dict[tuple[str, tuple[str, ...]], set[int]] = {}
    owners = {}
    for index, node in enumerate(step.graph.find_nodes(op="placeholder")):
        if node.meta.get("fsdp") is not None:
            owners[require(node).unit, require(node).parameters] = index
    slots = {
        (unit, name): (unit, names) for unit, names in owners for name in names
    }
    for node in step.nodes(Role.SHARD_GRADIENT, Role.FLAT_GRADIENT, Role.GRADIENT):
        record = require(node)
        if record.role is Role.GRADIENT:
            for name, spec in zip(record.parameters, record.specs, strict=True):
                offsets.setdefault(slots[record.unit, name], set()).add(spec.offset)
    return [(owners[key], tuple(sorted(found))) for key, found in offsets.items()]


def note_arrivals(compiled: Compiled, noted: Sequence[tuple[int, tuple[int, ...]]]) -> Compiled:
    """Wraps a compiled backward so that parameters without a gradient keep `None`."""

    def run(args: list[Any]) -> Any:  # noqa: ANN401
        for index, offsets in noted:
            flat = FlatShard.of(args[index])
            if flat is not None:
                flat.note_gradients(offsets)
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
