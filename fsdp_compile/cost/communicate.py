"""Size, volume and time of each collective in a graph, and of each copy between host and device.

Collectives of ours, and those that a program has of its own, as tensor and expert parallelism: these have a lane of
their group, on its link.
"""

from __future__ import annotations

import dataclasses
import enum
from operator import getitem
from typing import Any

import torch.distributed as dist
from torch import fx

from fsdp_compile._torch.distributed import collectives, resolve_group
from fsdp_compile.cost.hardware import Hardware, share_of_others
from fsdp_compile.cost.sizes import result_bytes, tensor_bytes, tensors_of
from fsdp_compile.ir.graph import Role, record_of, require, role_of
from fsdp_compile.layout.hosts import GroupRanks
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
        link: Name of the hardware's link, or bus.
        bytes_per_s: What a rank sends on it in a large message.
        ranks: Size of the group; of a copy, 1.
        size_bytes: Bytes of the whole, padding included: of the gathered messages, or of those before the reduction.
        sent_bytes: Bytes that each rank sends to others.
        alone_us: Time on the link, or on the bus, when nothing else uses it.
    """

    kind: Kind
    group: str
    link: str
    bytes_per_s: float
    ranks: int
    size_bytes: int
    sent_bytes: float
    alone_us: float


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective of ours, or a copy."""
    return role_of(node) in _KINDS


def _over(ranks: GroupRanks, hardware: Hardware, kind: Kind, size_bytes: int, *, group: str) -> Communication:
    # An all-reduce is a reduce-scatter and an all-gather.
    sent_bytes = size_bytes * share_of_others(ranks.size) * (2 if kind is Kind.REPLICATE else 1)
    alone_us = hardware.collective_us(kind.value, sent_bytes, ranks)
    link, rate = hardware.link_of(ranks).name, hardware.bytes_per_s(ranks)
    return Communication(kind, group, link, rate, ranks.size, size_bytes, sent_bytes, alone_us)


def communication(node: fx.Node, hardware: Hardware) -> Communication:
    """The collective or the copy that a node starts, or the exchange of rows that it is."""
    kind, spec = _KINDS[require(node).role], require(node).specs[0]
    if kind in COPIES:
        bus, size_bytes = hardware.device.host, result_bytes(node)
        return Communication(kind, kind.value, bus.name, bus.bytes_per_s, 1, size_bytes, 0.0, bus.copy_us(size_bytes))
    if kind is Kind.EXCHANGE:
        return exchange(node, spec, hardware)
    if kind is Kind.REPLICATE:
        ranks, group = spec.replicate_ranks, spec.replicate_group
    elif spec.post_forward_size > 1 and node.args[-1] == spec.post_forward_group:
        ranks, group = spec.post_forward_ranks, spec.post_forward_group
    elif kind is Kind.REDUCE:
        # It may have a process group of its own, over the same ranks and link as all-gathers.
        ranks, group = spec.shard_ranks, spec.scatter_group
    else:
        ranks, group = spec.shard_ranks, spec.group
    size_bytes = sum(map(result_bytes, [node] if kind is Kind.GATHER else node.all_input_nodes))
    sent = _over(ranks, hardware, kind, size_bytes, group=group)
    messages_us = hardware.link_of(ranks).message.value * (len(tensors_of(node)) - 1)
    return dataclasses.replace(sent, alone_us=sent.alone_us + messages_us)


EXCHANGED = (LOOK_UP, REDUCE_ROWS, AVERAGE_ROWS)
"""Operators that exchange rows, as markers and behind the passes."""


def exchange(node: fx.Node, spec: UnshardSpec, hardware: Hardware) -> Communication:
    """An exchange of rows and of their ids, if each rank wants as many rows of each other."""
    rows, ids = (node, node.args[1]) if node.target is LOOK_UP else node.args[-5:-3]
    assert isinstance(rows, fx.Node)
    assert isinstance(ids, fx.Node)
    # An id is an int64.
    size_bytes = result_bytes(rows) + sum(8 * tensor_bytes(t) // t.element_size() for t in tensors_of(ids))
    sent = _over(spec.shard_ranks, hardware, Kind.EXCHANGE, size_bytes, group=spec.group)
    # Two collectives before that of the rows say how many rows each rank wants of each other, and which: latency alone.
    rounds_us = 2 * hardware.collective_us(Kind.EXCHANGE.value, 0, spec.shard_ranks)
    return dataclasses.replace(sent, alone_us=sent.alone_us + rounds_us)


_OWN_KINDS: dict[Any, Kind] = {
    collectives.all_gather_into_tensor.default: Kind.GATHER,
    collectives.all_gather_into_tensor_coalesced.default: Kind.GATHER,
    collectives.reduce_scatter_tensor.default: Kind.REDUCE,
    collectives.reduce_scatter_tensor_coalesced.default: Kind.REDUCE,
    collectives.all_reduce.default: Kind.REPLICATE,
    collectives.all_reduce_coalesced.default: Kind.REPLICATE,
    collectives.all_to_all_single.default: Kind.ALL_TO_ALL,
}


def is_own(node: fx.Node) -> bool:
    """Whether a node starts a collective of the program's own."""
    return node.target in _OWN_KINDS and record_of(node) is None


def own_start_of(node: fx.Node) -> fx.Node | None:
    """The collective of the program's own that a node waits for; `None` for any other node."""
    if node.target is not collectives.wait_tensor.default:
        return None
    source = node.args[0]
    if isinstance(source, fx.Node) and source.target is getitem:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and is_own(source) else None


def own_communication(node: fx.Node, hardware: Hardware) -> Communication:
    """Size, volume, link and time of such a collective; a group of one rank, or one that is gone, takes no time."""
    name = str(node.args[-1])
    group = resolve_group(name)
    ranks = GroupRanks(1) if group is None else GroupRanks.of(dist.get_process_group_ranks(group))
    said = "" if group is None else group.group_desc
    lane = said.removeprefix("mesh_") if said.startswith("mesh_") else f"group {name}"  # torch's name of a dimension
    kind = _OWN_KINDS[node.target]
    # Of all that is gathered or sent, a rank sends all but its part.
    whole = result_bytes(node) if kind is Kind.GATHER else sum(map(result_bytes, node.all_input_nodes))
    sent = _over(ranks, hardware, kind, whole, group=lane)
    return sent if ranks.size > 1 else dataclasses.replace(sent, alone_us=0.0)
