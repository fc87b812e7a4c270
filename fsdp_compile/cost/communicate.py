"""Size, volume and time of each collective in a graph."""

from __future__ import annotations

import dataclasses
import enum

from torch import fx

from fsdp_compile.cost.formulas import collective_us, share_of_others
from fsdp_compile.cost.hardware import Link
from fsdp_compile.cost.sizes import tensor_bytes, tensors_of
from fsdp_compile.ir.record import Role, require, role_of


class Kind(enum.Enum):
    """What a collective does."""

    GATHER = "all-gather"
    REDUCE = "reduce-scatter"
    REPLICATE = "all-reduce"


_KINDS = {Role.GATHER: Kind.GATHER, Role.REDUCE: Kind.REDUCE, Role.REPLICATE: Kind.REPLICATE}


@dataclasses.dataclass(frozen=True)
class Communication:
    """One collective.

    Attributes:
        kind: What it does.
        group: Alias of the process group.
        ranks: Size of the group.
        size_bytes: Bytes of the whole: of the gathered messages, or of those before the reduction.
        sent_bytes: Bytes that each rank sends.
        time_us: Time on the link when nothing else uses it.
    """

    kind: Kind
    group: str
    ranks: int
    size_bytes: int
    sent_bytes: float
    time_us: float


def is_start(node: fx.Node) -> bool:
    """Whether a node starts a collective of ours."""
    return role_of(node) in _KINDS


def communication(node: fx.Node, link: Link) -> Communication:
    """The collective that a node starts."""
    kind = _KINDS[require(node).role]
    spec = require(node).specs[0]
    sent_over_replicas = kind is Kind.REPLICATE
    ranks, group = (spec.replicas, spec.replicate_group) if sent_over_replicas else (spec.size, spec.group)
    if spec.kept_over > 1 and node.args[-1] == spec.kept_group:
        ranks, group = spec.kept_over, spec.kept_group
    sources = [node] if kind is Kind.GATHER else node.all_input_nodes
    size_bytes = sum(tensor_bytes(t) for source in sources for t in tensors_of(source))
    sent_bytes = size_bytes * share_of_others(ranks) * (2 if sent_over_replicas else 1)
    time_us = collective_us(
        sent_bytes, ranks, launch_us=link.launch.value, hop_us=link.hop.value, bytes_per_s=link.bytes_per_s
    )
    return Communication(kind, group, ranks, size_bytes, sent_bytes, time_us)
