"""Collectives that a program has of its own, as tensor and expert parallelism: they stay where the program has them.

They count as compute, on the link of their own group: the program waits for each right away.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import fx

from fsdp_compile._torch.distributed import collectives, resolve_group
from fsdp_compile.cost.formulas import share_of_others
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.ir.graph import record_of
from fsdp_compile.layout.hosts import GroupRanks

_GATHERS = (collectives.all_gather_into_tensor.default, collectives.all_gather_into_tensor_coalesced.default)
_SCATTERS = (collectives.reduce_scatter_tensor.default, collectives.reduce_scatter_tensor_coalesced.default)
_SUMS = (collectives.all_reduce.default, collectives.all_reduce_coalesced.default)
_EXCHANGES = (collectives.all_to_all_single.default,)
_KINDS: dict[Any, str] = {
    **dict.fromkeys(_GATHERS, "all-gather"),
    **dict.fromkeys(_SCATTERS, "reduce-scatter"),
    **dict.fromkeys(_SUMS, "all-reduce"),
    **dict.fromkeys(_EXCHANGES, "all-to-all"),
}


def is_own(node: fx.Node) -> bool:
    """Whether a node starts a collective of the program's own."""
    return node.target in _KINDS and record_of(node) is None


def own_us(node: fx.Node, hardware: Hardware) -> Any:
    """Time of such a collective, alone on its link, in us."""
    ranks = _ranks(node)
    if ranks.size == 1:
        return 0.0
    kind = _KINDS[node.target]
    # Of all that is gathered or sent, a rank sends all but its part; a sum is a reduce-scatter and an all-gather.
    whole = result_bytes(node) if kind == "all-gather" else sum(map(result_bytes, node.all_input_nodes))
    sent_bytes = whole * share_of_others(ranks.size) * (2 if kind == "all-reduce" else 1)
    return hardware.collective_us(kind, sent_bytes, ranks)


def _ranks(node: fx.Node) -> GroupRanks:
    group = resolve_group(str(node.args[-1]))  # the last argument of each is the group's name
    return GroupRanks(1) if group is None else GroupRanks.of(dist.get_process_group_ranks(group))
