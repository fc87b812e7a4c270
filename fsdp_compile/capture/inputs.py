"""Which inputs of a graph are flat shards, and whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fsdp_compile.ir.record import KEY, Phase, Record, Role
from fsdp_compile.parameters.flat import FlatShard


def flat_inputs(inputs: Sequence[object]) -> dict[int, Record]:
    """Finds the flat shards among the inputs of Dynamo's graph.

    Args:
        inputs: Example inputs, real tensors for parameters.

    Returns:
        Position of the input to the record of its flat shard.
    """
    flats = {i: FlatShard.of(value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    return {i: _record(flat) for i, flat in flats.items() if flat is not None}


def _record(flat: FlatShard) -> Record:
    unit = flat.unit
    names = tuple(unit.parameter_name(slot) for slot in flat.slots)
    return Record(Role.FLAT, unit.title, names, tuple(slot.spec for slot in flat.slots), Phase.FORWARD)


def name_inputs(graph: fx.Graph, flats: Mapping[int, Record]) -> None:
    """Writes the records on the placeholders of a graph that AOTAutograd made of Dynamo's."""
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        index = getattr(node.meta.get("desc"), "idx", position)
        if index in flats and not node.name.startswith("tangents"):
            node.meta[KEY] = flats[index]
