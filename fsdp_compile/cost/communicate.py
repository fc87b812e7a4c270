"""Size, volume and time of each collective in a graph, and of each copy between host and device."""

from __future__ import annotations

import dataclasses
import enum

from torch import fx

from fsdp_compile.cost.formulas import copy_us, share_of_others
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.links import Link
from fsdp_compile.cost.sizes import result_bytes, tensor_bytes, tensors_of
from fsdp_compile.ir.graph import Role, require, role_of
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops.embedding import AVERAGE_ROWS, LOOK_UP, REDUCE_ROWS


class Kind(enum.Enum):
    """What a collective or a copy does."""

    GATHER = "all-gather"
    REDUCE = "reduce-scatter"
    REPLICATE = "all-reduce"
    EXCHANGE = "row exchange"
    ALL_TO_ALL = "all-to-all"
    COPY_IN = "copy from the host"
    COPY_OUT = "copy to the host"


COPIES = (Kind.COPY_IN, Kind.COPY_OUT)
"""Kinds that no other rank takes part in."""

_KINDS = {
    Role.GATHER: Kind.GATHER,
    Role.REDUCE: Kind.REDUCE,
    Role.REPLICATE: Kind.REPLICATE,
    Role.LOOK_UP: Kind.EXCHANGE,
    Role.AVERAGE_ROWS: Kind.EXCHANGE,
    Role.OFFLOAD_IN: Kind.COPY_IN,
    Role.OFFLOAD_OUT: Kind.COPY_OUT,
}


@dataclasses.dataclass(frozen=True)
class Communication:
    """One collective, or one copy.

    Attributes:
        group: Alias of the process group; of a copy, the direction on the bus.
        link: Alias of the group whose ranks it connects.
        sent_on: Name of the hardware's link, or bus.
        bytes_per_s: What a rank sends on it in a large message.
        size_bytes: Bytes of the whole: of the gathered messages, or of those before the reduction.
        sent_bytes: Bytes that each rank sends to others.
        time_us: Time on the link, or on the bus, when nothing else uses it.
    """

    kind: Kind
    group: str
    link: str
    sent_on: str
    bytes_per_s: float
    ranks: int
    size_bytes: int
    sent_bytes: float
    time_us: float


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective of ours, or a copy."""
    return role_of(node) in _KINDS


def transfer_of(node: fx.Node, hardware: Hardware) -> Communication:
    """The collective or the copy that a node starts."""
    return (
        copy_of(node, hardware.device.host) if _KINDS[require(node).role] in COPIES else communication(node, hardware)
    )


def copy_of(node: fx.Node, bus: Link) -> Communication:
    """The copy between host and device that a node starts."""
    kind = _KINDS[require(node).role]
    size_bytes = sum(map(tensor_bytes, tensors_of(node)))
    time_us = copy_us(size_bytes, launch_us=bus.launch.value, bytes_per_s=bus.bytes_per_s)
    return Communication(kind, kind.value, kind.value, bus.name, bus.bytes_per_s, 1, size_bytes, 0.0, time_us)


def communication(node: fx.Node, hardware: Hardware) -> Communication:
    """The collective that a node starts, or the exchange of rows that it is."""
    kind = _KINDS[require(node).role]
    spec = require(node).specs[0]
    if kind is Kind.EXCHANGE:
        return exchange(node, spec, hardware)
    sent_over_replicas = kind is Kind.REPLICATE
    ranks, group = (
        (spec.replicate_ranks, spec.replicate_group) if sent_over_replicas else (spec.shard_ranks, spec.group)
    )
    if spec.post_forward_size > 1 and node.args[-1] == spec.post_forward_group:
        ranks, group = spec.post_forward_ranks, spec.post_forward_group
    # Reduce-scatters may have a process group of their own, over the same ranks and link as all-gathers.
    link_of = group
    if kind is Kind.REDUCE:
        group = spec.scatter_group
    sources = [node] if kind is Kind.GATHER else node.all_input_nodes
    size_bytes = sum(tensor_bytes(t) for source in sources for t in tensors_of(source))
    # An all-reduce is a reduce-scatter and an all-gather.
    sent_bytes = size_bytes * share_of_others(ranks.size) * (2 if sent_over_replicas else 1)
    link = hardware.link_of(ranks)
    time_us = hardware.collective_us(kind.value, sent_bytes, ranks)
    time_us += link.message.value * (len(tensors_of(node)) - 1)
    rate = hardware.bytes_per_s(ranks)
    return Communication(kind, group, link_of, link.name, rate, ranks.size, size_bytes, sent_bytes, time_us)


EXCHANGED = (LOOK_UP, REDUCE_ROWS, AVERAGE_ROWS)
"""Operators that exchange rows, as markers and behind the passes."""
ROUNDS = 3
"""Collectives of an exchange: how many rows each rank wants of each other, which ones, and the rows."""


def exchange(node: fx.Node, spec: UnshardSpec, hardware: Hardware) -> Communication:
    """An exchange of rows and of their ids, if each rank wants as many rows of each other."""
    rows, ids = (node, node.args[1]) if node.target is LOOK_UP else node.args[-5:-3]
    assert isinstance(rows, fx.Node)
    assert isinstance(ids, fx.Node)
    # An id is an int64.
    size_bytes = result_bytes(rows) + sum(8 * tensor_bytes(t) // t.element_size() for t in tensors_of(ids))
    sent_bytes = size_bytes * share_of_others(spec.size)
    ranks = spec.shard_ranks
    time_us = hardware.collective_us(Kind.EXCHANGE.value, sent_bytes, ranks)
    # The rounds before the rows send next to nothing: latency alone.
    time_us += (ROUNDS - 1) * hardware.collective_us(Kind.EXCHANGE.value, 0, ranks)
    link, rate, alias = hardware.link_of(ranks), hardware.bytes_per_s(ranks), spec.group
    return Communication(Kind.EXCHANGE, alias, alias, link.name, rate, ranks.size, size_bytes, sent_bytes, time_us)
