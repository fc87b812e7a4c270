"""Splits buckets where the collectives at the edges of a graph decide when it ends.

Little is computed before the first units are needed, so their gathers cannot be hidden whole; the same is true of the
reductions that are ready last. Where the link is about as busy as the processor, a delay at the edge stays: each unit
is then complete only after computing needs it. Split by parameter, computing goes on when the first parameter is there,
and only the last gradients are still being reduced when it ends.

Computing from a gather's first use on follows the gather and all gathers before it. The largest sum of the two is the
earliest end of the graph. Units are split whose sum is larger than it would be if every unit were split.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from torch import fx

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.timeline import times_us
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.passes.bucketing.messages import ParamCollective, is_small

LEAST_LATENCIES = 4.0
"""A bucket is not split further once its bytes take less than this many times the latency of a collective."""
NEAR = 1.002
"""A graph may end later by this factor before a unit is split for it."""
Groups = list[list[ParamCollective]]


@dataclasses.dataclass(frozen=True)
class Edges:
    """Times of a graph, which say what is at its edges; `before_us` is the time of computing all nodes before one."""

    before_us: dict[fx.Node, float]
    total_us: float
    hardware: Hardware

    def split_gathers(self, groups: Groups) -> Groups:
        """Splits groups, in the order in which they are read, that would delay computing from their first use on."""
        least_us, over_us = self.total_us, 0.0
        for run in (run for group in groups for run in self._runs(group, Kind.GATHER)):
            over_us += self._time_us(run, Kind.GATHER)
            least_us = max(least_us, over_us + self._left_us(run))
        done: Groups = []
        over_us = 0.0
        for group in groups:
            over_us += self._time_us(group, Kind.GATHER)
            late = over_us + self._left_us(group) > NEAR * least_us
            done += self._runs(group, Kind.GATHER) if late else [group]
        return done

    def split_reductions(self, groups: Groups) -> Groups:
        """Splits groups, in the order in which they are ready, that would delay the end of the graph."""
        least_us, left_us = self.total_us, 0.0
        for run in (run for group in groups[::-1] for run in self._last_runs(group)[::-1]):
            left_us += self._time_us(run, Kind.REDUCE)
            least_us = max(least_us, self._ready_us(run) + left_us)
        done: Groups = []
        left_us = 0.0
        for group in groups[::-1]:
            left_us += self._time_us(group, Kind.REDUCE)
            late = self._ready_us(group) + left_us > NEAR * least_us
            done = (self._last_runs(group) if late else [group]) + done
        return done

    def _left_us(self, singles: Sequence[ParamCollective]) -> float:
        """Time of computing from the first use of any of them on."""
        return self.total_us - min(self.before_us[single.start] for single in singles)

    def _ready_us(self, singles: Sequence[ParamCollective]) -> float:
        """Time of computing until the last of their gradients is there."""
        return max(self.before_us[single.start] for single in singles)

    def _last_runs(self, singles: Sequence[ParamCollective]) -> Groups:
        """Cuts a sequence from its end."""
        runs = self._runs(singles[::-1], Kind.REDUCE)
        return [run[::-1] for run in runs[::-1]] if len(runs) > 1 else [list(singles)]

    def _runs(self, singles: Sequence[ParamCollective], kind: Kind) -> Groups:
        """Cuts a sequence into runs of enough bytes."""
        # Small ones are one message, so they stay together.
        ordered = [s for s in singles if is_small(s)] + [s for s in singles if not is_small(s)]
        runs: Groups = [[]]
        run_bytes = 0
        for single in ordered:
            if runs[-1] and self._is_enough(run_bytes, runs[-1][0].ranks, kind):
                runs.append([])
                run_bytes = 0
            runs[-1].append(single)
            run_bytes += _shard_bytes(single)
        if len(runs) > 1 and not self._is_enough(run_bytes, runs[-1][0].ranks, kind):
            runs[-2:] = [runs[-2] + runs[-1]]
        return runs

    def _is_enough(self, shard_bytes: int, ranks: GroupRanks, kind: Kind) -> bool:
        latency_us = self.hardware.collective_us(kind.value, 0, ranks)
        enough: bool = self._sending_us(shard_bytes, ranks, kind) >= (1 + LEAST_LATENCIES) * latency_us
        return enough

    def _time_us(self, singles: Sequence[ParamCollective], kind: Kind) -> float:
        return self._sending_us(sum(map(_shard_bytes, singles)), singles[0].ranks, kind)

    def _sending_us(self, shard_bytes: int, ranks: GroupRanks, kind: Kind) -> float:
        time_us: float = self.hardware.collective_us(kind.value, shard_bytes * (ranks.size - 1), ranks)
        return time_us


def _shard_bytes(single: ParamCollective) -> int:
    """Bytes of this rank's part of a parameter, as it is sent."""
    size_bytes: int = single.extent * single.sent.meta["val"].element_size()
    return size_bytes


def edges_of(step: StepGraph, hardware: Hardware) -> Edges:
    """Times of a graph in which nothing is scheduled yet."""
    busy_us = times_us(step.graph, hardware, plan_kernels(step.graph, Fusion.KERNELS))
    reached = itertools.accumulate(busy_us.values(), initial=0.0)
    before_us = dict(zip(step.graph.nodes, reached, strict=False))
    return Edges(before_us, sum(busy_us.values()), hardware)
