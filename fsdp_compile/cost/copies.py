"""Bytes that a graph only moves on their way into a collective or out of it.

    message = cat(rows of %a, rows of %b)      copies both, unless a kernel writes them there at once
    bias = clone(slice of %message)            copies it, unless a kernel that computes reads it in place

A cast is no copy: it would be there without a collective. Views, and messages that are sent in place, move nothing.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

import torch
from torch import fx

from fsdp_compile.cost.fusion import Kernels, shown_by
from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.ir.graph import Role, StepGraph, record_of
from fsdp_compile.ops.post_forward import OWN_PART

aten = torch.ops.aten
_MOVES = {aten.cat, aten.clone, aten.constant_pad_nd, OWN_PART.overloadpacket}


class Way(enum.Enum):
    """On the way to where bytes are copied."""

    INTO_GATHERS = "into gathers"
    OUT_OF_GATHERS = "out of gathers"
    INTO_REDUCTIONS = "into reductions"
    OUT_OF_REDUCTIONS = "out of reductions"
    """Reduced messages that are put together to the gradient of a flat parameter: a rank's share, not the whole."""


_WAYS = {
    Role.SHARD: Way.INTO_GATHERS,
    Role.COPY_OUT: Way.OUT_OF_GATHERS,
    Role.FULL: Way.OUT_OF_GATHERS,
    Role.POST_FORWARD_SHARD: Way.OUT_OF_GATHERS,
    Role.GRADIENT: Way.INTO_REDUCTIONS,
    Role.SHARD_GRADIENT: Way.OUT_OF_REDUCTIONS,
    Role.FLAT_GRADIENT: Way.OUT_OF_REDUCTIONS,
    Role.PARTIAL_GRADIENT: Way.OUT_OF_REDUCTIONS,
}


@dataclasses.dataclass(frozen=True)
class Copy:
    """One node that copies, for the collectives of `parameters`."""

    way: Way
    node: str
    parameters: tuple[str, ...]
    size_bytes: int


def copies_of(step: StepGraph, kernels: Kernels) -> Iterator[Copy]:
    """Every copy in a graph that is there because of a collective."""
    for node in step.graph.nodes:
        record = record_of(node)
        # An inner value never reaches memory: its kernel writes the result directly to its destination.
        if record is None or record.role not in _WAYS or not _moves(node) or node in kernels.inner:
            continue
        moved = _moved_bytes(node, kernels)
        if moved:
            yield Copy(_WAYS[record.role], node.name, record.parameters, moved)


def _moves(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _MOVES


def _moved_bytes(node: fx.Node, kernels: Kernels) -> int:
    """Bytes that a move takes from memory."""
    moved = 0
    for source in node.all_input_nodes:
        maker = shown_by(source)
        # Storing what the same kernel has just computed costs no read.
        if maker not in kernels.inner:
            moved += min(result_bytes(source), result_bytes(node))
        elif _moves(maker):
            moved += _moved_bytes(maker, kernels)
    return moved
