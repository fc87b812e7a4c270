"""Smaller buckets at the edges of a graph, where too little is computed beside a collective.

Little is computed before the first units are needed, so their gathers cannot be hidden whole; the same is true of the
reductions that are ready last. Split by parameter, computing begins when the first parameter is there, and only the
last gradients are still on their way when it ends.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from torch import fx

from fsdp_compile.cost.compute import node_costs
from fsdp_compile.cost.formulas import collective_us
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware, Link
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.passes.pieces import Single, is_small

LEAST_LATENCIES = 4.0
"""A bucket is not split further once its bytes take less than this many times the latency of a collective."""
Groups = list[list[Single]]


@dataclasses.dataclass(frozen=True)
class Edges:
    """Times of a graph by which its edges are told.

    Attributes:
        before_us: For each node, the time of computing everything before it.
        total_us: Time of computing everything.
        link: Over which messages are sent.
    """

    before_us: dict[fx.Node, float]
    total_us: float
    link: Link

    def split_gathers(self, groups: Groups) -> Groups:
        """Splits groups that are read, first of them, when less time has passed than their gather takes."""
        return [
            run
            for group in groups
            for run in ([group] if self.before_us[group[0].start] >= self._time_us(group) else self._runs(group))
        ]

    def split_reductions(self, groups: Groups) -> Groups:
        """Splits groups whose last gradient is ready when less time is left than their reduction takes."""
        done: Groups = []
        for group in groups:
            left_us = self.total_us - max(self.before_us[single.start] for single in group)
            runs = [group] if left_us >= self._time_us(group) else self._runs(group[::-1])
            done += [run[::-1] for run in runs[::-1]] if len(runs) > 1 else runs
        return done

    def _runs(self, singles: Sequence[Single]) -> Groups:
        """Cuts a sequence where enough has come together; small ones go first, since they travel as one message."""
        ordered = [s for s in singles if is_small(s)] + [s for s in singles if not is_small(s)]
        runs: Groups = [[]]
        for single in ordered:
            if runs[-1] and self._is_enough(runs[-1]):
                runs.append([])
            runs[-1].append(single)
        if len(runs) > 1 and not self._is_enough(runs[-1]):
            runs[-2:] = [runs[-2] + runs[-1]]
        return runs

    def _is_enough(self, singles: Sequence[Single]) -> bool:
        latency_us = _collective_us(0, singles[0].ranks, self.link)
        return self._time_us(singles) >= (1 + LEAST_LATENCIES) * latency_us

    def _time_us(self, singles: Sequence[Single]) -> float:
        ranks = singles[0].ranks
        held_bytes = sum(s.extent * s.sent.meta["val"].element_size() for s in singles)
        return _collective_us(held_bytes * (ranks - 1), ranks, self.link)


def edges_of(step: StepGraph, hardware: Hardware) -> Edges:
    """Times of a graph in which nothing is scheduled yet."""
    costs = node_costs(step.graph, hardware.device, plan_kernels(step.graph, Fusion.KERNELS))
    reached = itertools.accumulate((costs[node].time_us for node in step.graph.nodes), initial=0.0)
    before_us = dict(zip(step.graph.nodes, reached, strict=False))
    return Edges(before_us, sum(cost.time_us for cost in costs.values()), hardware.link)


def _collective_us(sent_bytes: int, ranks: int, link: Link) -> float:
    return collective_us(
        sent_bytes, ranks, launch_us=link.launch.value, hop_us=link.hop.value, bytes_per_s=link.bytes_per_s
    )
