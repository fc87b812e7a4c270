"""Which values never reach memory because a compiler fuses the operators that make and read them.

    mm, [to_copy, pow, mean, rsqrt, mul], mm      the bracket is one kernel: its inner values stay in registers

The model: fusible operators (pointwise ones and reductions) between two that are not form one kernel. A value that
is only used inside its own kernel is not written. Run operator by operator, every value is written.
"""

from __future__ import annotations

import dataclasses
import enum
from operator import getitem

import torch
from torch import fx

from fsdp_compile._torch import collectives
from fsdp_compile.ir.markers import RESHARD
from fsdp_compile.ir.queries import is_alias
from fsdp_compile.ir.record import Role, role_of

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
_SHARES_MEMORY = {aten._unsafe_view.default, collectives.wait_tensor.default}
_COMMUNICATION = {
    Role.GATHER, Role.GATHER_ITEM, Role.GATHER_WAIT, Role.REDUCE, Role.REDUCE_ITEM, Role.REDUCE_WAIT,
    Role.REPLICATE, Role.REPLICATE_ITEM, Role.REPLICATE_WAIT, Role.RESHARD,
    Role.OFFLOAD_IN, Role.OFFLOAD_IN_WAIT, Role.OFFLOAD_OUT, Role.OFFLOAD_OUT_WAIT,
}  # fmt: skip


class Fusion(enum.Enum):
    """Who runs the graph."""

    NONE = "none"
    """Operator by operator."""
    KERNELS = "kernels"
    """A compiler that fuses pointwise operators and reductions."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which kernel each computing node belongs to, and which values stay inside theirs.

    Attributes:
        of: Node to the number of its kernel; nodes that launch nothing are absent.
        inner: Nodes whose results are never written.
        fused: Whether pointwise operators and reductions run in kernels with others.
    """

    of: dict[fx.Node, int]
    inner: frozenset[fx.Node]
    fused: bool


def shares_memory(node: fx.Node) -> bool:
    """Whether a node's result is memory that one of its inputs holds: a view, a wait, an item, an in-place update."""
    if node.op != "call_function":
        return False
    if node.target is getitem or node.target in _SHARES_MEMORY:
        return True
    schema = getattr(node.target, "_schema", None)
    return is_alias(node) or (schema is not None and any(r.alias_info is not None for r in schema.returns))


def launches_nothing(node: fx.Node) -> bool:
    """Whether a node is free on the compute lane."""
    return (
        node.op != "call_function"
        or role_of(node) in _COMMUNICATION
        or node.target is RESHARD
        or (shares_memory(node) and not _writes(node))
    )


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler joins a node with its fusible neighbours."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _REDUCTIONS or packet in _POINTWISE:
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


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
    inner = {node for node in of if fusion is Fusion.KERNELS and is_fusible(node) and _stays_inside(node, of)}
    return Kernels(of, frozenset(inner), fusion is Fusion.KERNELS)


def _stays_inside(node: fx.Node, of: dict[fx.Node, int]) -> bool:
    todo, seen = list(node.users), set(node.users)
    while todo:
        user = todo.pop()
        if user in of:
            if of[user] != of[node]:
                return False
        elif shares_memory(user):
            todo.extend(u for u in user.users if u not in seen)
            seen.update(user.users)
        else:
            return False
    return True


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
