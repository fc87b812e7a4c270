"""How the ranks of a process group are spread over hosts, which decides the link that its collectives are sent on.

    rank        0 1 2 3 | 4 5 6 7        two hosts of four ranks
    shard       a a a a | b b b b        4 ranks with stride 1: all on one host
    replicate   a b c d | a b c d        2 ranks with stride 4: one on each host

Hosts have consecutive ranks, as torchrun and Slurm number them.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class GroupRanks:
    """The ranks of a process group, by what they have in common in all groups of a mesh dimension.

    Attributes:
        size: How many they are.
        stride: Distance between neighbours among them, in ranks of the world.
    """

    size: int
    stride: int = 1

    @classmethod
    def of(cls, ranks: Sequence[int]) -> GroupRanks:
        """Those of a group with these ranks of the world."""
        return cls(len(ranks), max((abs(b - a) for a, b in itertools.pairwise(ranks)), default=1))

    def on_one_host(self, ranks_per_host: int) -> int:
        """How many of them share a host; on the host with the fewest, if they do not divide evenly."""
        most = min(self.size, max(1, ranks_per_host // self.stride))
        return self.size % most or most


def ranks_per_host(environment: Mapping[str, str] = os.environ) -> int | None:
    """Ranks on each host as a launcher says, the same on every rank; `None` without a launcher."""
    local, world, hosts = (
        int(text) if (text := environment.get(name, "")).isdecimal() else 0
        for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
    # Hosts may have different numbers of ranks, and all ranks must come to the same plans.
    return -(-world // hosts) if hosts and local and world != local * hosts else local or None
