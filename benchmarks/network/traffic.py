"""How many bytes a rank sends for a collective, by the ring algorithms, and a count of what was sent."""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.Enum):
    """A collective."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


def sent_bytes(kind: Kind, size_bytes: int, ranks: int) -> float:
    """Bytes that each rank sends.

    Args:
        kind: The collective.
        size_bytes: Bytes of the whole: the gathered tensor, or what each rank brings to a reduction.
        ranks: Size of the group.
    """
    share = (ranks - 1) / ranks
    match kind:
        case Kind.BARRIER:
            return 0.0
        case Kind.ALL_REDUCE:
            return 2 * size_bytes * share
        case Kind.BROADCAST:
            return size_bytes if ranks > 1 else 0.0
    return size_bytes * share


def full_sharding_bytes(parameter_bytes: float, ranks: int) -> float:
    """What is sent if every parameter is gathered twice and its gradient reduced once: `3 P (N-1)/N`."""
    return 3 * parameter_bytes * (ranks - 1) / ranks


@dataclasses.dataclass
class Traffic:
    """What a rank has sent.

    Attributes:
        calls: Collectives by kind; a coalesced call is one.
        sent: Bytes by kind.
        node_bytes: Of these, those that stayed inside of a node.
        order: Kinds and bytes in the order of the calls.
        fill_s: Time that was spent on writing outputs, which a real network would not take from the processor.
    """

    calls: dict[Kind, int] = dataclasses.field(default_factory=dict)
    sent: dict[Kind, float] = dataclasses.field(default_factory=dict)
    node_bytes: float = 0.0
    order: list[tuple[Kind, float]] = dataclasses.field(default_factory=list)
    fill_s: float = 0.0

    def note(self, kind: Kind, size_bytes: float, *, in_node: bool) -> None:
        """Counts one collective, of a group inside of a node or of any other."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent[kind] = self.sent.get(kind, 0.0) + size_bytes
        self.node_bytes += size_bytes if in_node else 0.0
        self.order.append((kind, size_bytes))

    def clear(self) -> None:
        """Forgets everything."""
        self.calls.clear()
        self.sent.clear()
        self.node_bytes = 0.0
        self.order.clear()
        self.fill_s = 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes of all kinds."""
        return sum(self.sent.values())

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return {
            "calls": {kind.value: count for kind, count in self.calls.items()},
            "sent_bytes": {kind.value: size for kind, size in self.sent.items()},
            "total_sent_bytes": self.total_bytes,
            "node_bytes": self.node_bytes,
            "fill_s": self.fill_s,
        }
