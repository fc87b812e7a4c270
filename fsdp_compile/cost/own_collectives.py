"""Collectives that a program has of its own, as tensor and expert parallelism: a lane of their group, on its link."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch.distributed as dist
from torch import fx

from fsdp_compile._torch.distributed import collectives, resolve_group
from fsdp_compile.cost.communicate import Communication, Kind
from fsdp_compile.cost.formulas import share_of_others
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.ir.graph import record_of
from fsdp_compile.layout.hosts import GroupRanks

_GATHERS = (collectives.all_gather_into_tensor.default, collectives.all_gather_into_tensor_coalesced.default)
_SCATTERS = (collectives.reduce_scatter_tensor.default, collectives.reduce_scatter_tensor_coalesced.default)
_SUMS = (collectives.all_reduce.default, collectives.all_reduce_coalesced.default)
_EXCHANGES = (collectives.all_to_all_single.default,)
_KINDS: dict[Any, Kind] = {
    **dict.fromkeys(_GATHERS, Kind.GATHER),
    **dict.fromkeys(_SCATTERS, Kind.REDUCE),
    **dict.fromkeys(_SUMS, Kind.REPLICATE),
    **dict.fromkeys(_EXCHANGES, Kind.ALL_TO_ALL),
}
_WAIT = collectives.wait_tensor.default
_MESH = "mesh_"
"""How torch begins the description of a mesh dimension's group."""


def is_own(node: fx.Node) -> bool:
    """Whether a node starts a collective of the program's own."""
    return node.target in _KINDS and record_of(node) is None


def own_start_of(node: fx.Node) -> fx.Node | None:
    """The collective of the program's own that a node waits for; `None` for any other node."""
    if node.target is not _WAIT:
        return None
    source = node.args[0]
    if isinstance(source, fx.Node) and source.target is getitem:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and is_own(source) else None


def own_communication(node: fx.Node, hardware: Hardware) -> Communication:
    """Size, volume, link and time of such a collective; a group of one rank, or one that is gone, takes no time."""
    group = resolve_group(str(node.args[-1]))  # the last argument of each is the group's name
    ranks = GroupRanks(1) if group is None else GroupRanks.of(dist.get_process_group_ranks(group))
    kind = _KINDS[node.target]
    # Of all that is gathered or sent, a rank sends all but its part; a sum is a reduce-scatter and an all-gather.
    whole = result_bytes(node) if kind is Kind.GATHER else sum(map(result_bytes, node.all_input_nodes))
    sent_bytes = whole * share_of_others(ranks.size) * (2 if kind is Kind.REPLICATE else 1)
    time_us = hardware.collective_us(kind.value, sent_bytes, ranks) if ranks.size > 1 else 0.0
    link, rate, lane = hardware.link_of(ranks).name, hardware.bytes_per_s(ranks), _lane(group, str(node.args[-1]))
    return Communication(kind, lane, lane, link, rate, ranks.size, whole, sent_bytes, time_us)


def _lane(group: dist.ProcessGroup | None, name: str) -> str:
    """The mesh dimension of a group, or what else torch says of it."""
    said = "" if group is None else group.group_desc
    return said.removeprefix(_MESH) if said.startswith(_MESH) else f"group {name}"
