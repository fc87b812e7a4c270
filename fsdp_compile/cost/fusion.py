"""Which values never reach memory because a compiler fuses the operators that make and read them.

    mm, [to_copy, pow, mean, rsqrt, mul], mm      the bracket is one kernel: its inner values stay in registers

The model: fusible operators (pointwise ones and reductions) between two that are not form one kernel. A value that
is only used inside its own kernel is not written. One that is pointwise and written is computed where the first
operator that does not fuse reads it, as late as that may be. A lookup is a call of its operator, see `looks_up`. Run
operator by operator, every value is written, in its place.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.ir.graph import EXCHANGES, ITEMS, STARTS, WAITS, Role, role_of
from fsdp_compile.ir.queries import returned_aliases
from fsdp_compile.ops.effects import RESHARD

aten = torch.ops.aten

_REDUCTIONS = {
    aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.all, aten.prod, aten.var_mean, aten.var,
    aten.argmax, aten.argmin, aten.logsumexp, aten._softmax, aten._log_softmax, aten._softmax_backward_data,
    aten._log_softmax_backward_data, aten.native_layer_norm, aten._fused_rms_norm, aten.linalg_vector_norm,
}  # fmt: skip
_POINTWISE = {
    aten.cat, aten.constant_pad_nd, aten.clone, aten._to_copy, aten.embedding, aten.index, aten.gather, aten.full,
    aten.arange, aten.zeros_like, aten.ones_like, aten.full_like, aten.slice_backward, aten.select_backward,
    aten.slice_scatter, aten.scalar_tensor, aten.silu_backward, aten.gelu_backward, aten.new_ones, aten.new_zeros,
    torch.ops.prims.convert_element_type, torch.ops.prims.iota,
}  # fmt: skip
_SHARES_MEMORY = {getitem, aten._unsafe_view.default, collectives.wait_tensor.default}
_COMMUNICATION = {
    *(*STARTS, *ITEMS, *WAITS, *EXCHANGES, Role.RESHARD),
    *(Role.OFFLOAD_IN, Role.OFFLOAD_IN_WAIT, Role.OFFLOAD_OUT, Role.OFFLOAD_OUT_WAIT),
}


WRITTEN = "inductor_realize_to_strides"
"""Inductor's own mark in a node's `meta`: the result is written to memory, in its place, for any reader."""


class Fusion(enum.Enum):
    """How the graph is run."""

    NONE = "none"
    """Operator by operator."""
    KERNELS = "kernels"
    """A compiler that fuses pointwise operators and reductions."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernel of each computing node, and which values stay inside theirs.

    Attributes:
        of: Node to the number of its kernel; nodes that launch nothing are absent.
        inner: Nodes whose results are never written.
        forced: For nodes that are computed later than in their place, the node right before which that happens.
    """

    of: Mapping[fx.Node, int]
    inner: frozenset[fx.Node]
    forced: Mapping[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)


def shares_memory(node: fx.Node) -> bool:
    """Whether a node's result shares memory with an input: a view, a wait, an item, an in-place update."""
    return node.op == "call_function" and (node.target in _SHARES_MEMORY or bool(returned_aliases(node.target)))


def shown_by(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while shares_memory(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    return shares_memory(node) and not any(returned_aliases(node.target))


def launches_nothing(node: fx.Node) -> bool:
    """Whether a node is free on the compute lane."""
    return node.op != "call_function" or role_of(node) in _COMMUNICATION or node.target is RESHARD or _is_view(node)


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler fuses a node with its fusible neighbours."""
    return node.op == "call_function" and _is_fusible(node.target) and not looks_up(node)


def looks_up(node: fx.Node) -> bool:
    """Whether a node takes rows out of an embedding's table that is in memory.

    A kernel of each reader would take them out of the table by itself, which would be in memory, gathered, until the
    last one has: much longer than the unit needs it, and as large as no activation.
    """
    if node.target is not aten.embedding.default:
        return False
    table = shown_by(node.all_input_nodes[0])
    return WRITTEN in table.meta or not is_fusible(table)


@functools.cache
def _is_fusible(operator: Any) -> bool:
    packet = getattr(operator, "overloadpacket", None)
    if packet in _REDUCTIONS or packet in _POINTWISE:
        return True
    return torch.Tag.pointwise in getattr(operator, "tags", ())


def plan_kernels(graph: fx.Graph, fusion: Fusion) -> Kernels:
    """Groups the nodes of a graph into kernels."""
    of: dict[fx.Node, int] = {}
    number = 0
    in_run = False
    for node in graph.nodes:
        if launches_nothing(node):
            continue
        joins = fusion is Fusion.KERNELS and is_fusible(node)
        number += not (joins and in_run)
        in_run = joins
        of[node] = number
    if fusion is Fusion.NONE:
        return Kernels(of, frozenset())
    fused = [node for node in of if is_fusible(node) and WRITTEN not in node.meta]
    inner = frozenset(node for node in fused if _stays_inside(node, of))
    place = {node: number for number, node in enumerate(graph.nodes)}
    forced = {
        node: _forced_by(node, place)
        for node in fused
        if node not in inner and getattr(node.target, "overloadpacket", None) not in _REDUCTIONS
    }
    later = {node: by for node, by in forced.items() if by is not None and by is not node}
    return Kernels(of, inner, later)


def _stays_inside(node: fx.Node, of: dict[fx.Node, int]) -> bool:
    todo, seen = list(node.users), set(node.users)
    while todo:
        user = todo.pop()
        if user in of:
            if of[user] != of[node]:
                return False
        # A view is not in `of`: what counts is in which kernel the view is read.
        elif shares_memory(user):
            todo.extend(u for u in user.users if u not in seen)
            seen.update(user.users)
        else:
            return False
    return True


def _forced_by(node: fx.Node, place: Mapping[fx.Node, int]) -> fx.Node | None:
    """The node at which a value must be in memory at the latest; `None` if its kernel goes on with what reads it.

    That is the first operator that reads it and does not fuse, or a view of it that has several readers of which one is
    such an operator.
    """
    views = list(filter(_is_view, node.users))
    others = [user for user in node.users if not _is_view(user)]
    if any(map(is_fusible, others)):
        return None
    if others and len(node.users) > 1:
        return node
    found = [_forced_by(view, place) for view in views] + [user for user in others if user.op != "output"]
    forcing = [user for user in found if user is not None]
    return min(forcing, key=place.__getitem__) if forcing and len(forcing) == len(found) else None
