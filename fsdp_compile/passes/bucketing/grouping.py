"""Which parameters share a message and a collective: the rules of the bucket pass, by the times of the cost model.

1. `cheapest_bucket`: large parameters are messages of their own, or packed with their neighbours. A message of its own
   is read in place, and costs `Link.message` on its link. Packed, large parameters are copied out of the gathered
   message, and gradients into the one that is reduced. The cheaper one is taken.
2. `Edges` splits buckets where the collectives at the edges of a graph decide when it ends. Little is computed before
   the first units are needed, so their gathers cannot be hidden whole; the same is true of the reductions that are
   ready last. Where the link is about as busy as the processor, a delay at the edge stays: each unit is then complete
   only after computing needs it. Split by parameter, computing goes on when the first parameter is there, and only the
   last gradients are still being reduced when it ends. Computing from a gather's first use on follows the gather and
   all gathers before it. The largest sum of the two is the earliest end of the graph. Units are split whose sum is
   larger than it would be if every unit were split.
   The graph of a block may be at an edge of its model or not: its unit is always split, into pieces so large that
   latencies take 1 % of the time. A message may stay for both phases, so both have the same pieces.
3. `join_neighbours`: neighbouring units share a collective if they are so small that its latency takes
   most of its time (40 gathers of 5 KB -> 2 gathers of 100 KB). Unsharded parameters, and full gradients that wait for
   their reduction, grow by no more than the bytes given.

All of it comes out the same on every rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence

from torch import fx

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.timeline import times_us
from fsdp_compile.ir.graph import StepGraph, require
from fsdp_compile.ir.queries import InputsByFlat
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.passes.bucketing.messages import (
    Bucket,
    ParamCollective,
    by_offset,
    collective_of,
    is_small,
    make_bucket,
)


def cheapest_bucket(singles: Sequence[ParamCollective], hardware: Hardware | None, partials: InputsByFlat) -> Bucket:
    """The bucket of some parameters in the layout that takes less time; without hardware, nothing is copied.

    `partials` are the inputs with accumulated reduce-scattered gradients.
    """
    apart = make_bucket(singles)
    if hardware is None or len({require(s.start).unit for s in singles}) > 1:
        return apart
    if any(s.is_post_forward or s.spec.gather_format or s.spec.hook or partials.of(s.flat) for s in singles):
        return apart
    packed = make_bucket(singles, packs_large=True)
    saved_us = (len(apart.pieces) - len(packed.pieces)) * hardware.link_of(singles[0].ranks).message.value
    # Packed, what would otherwise be used in place is copied.
    together = (single for piece in packed.pieces if len(piece.singles) > 1 for single in piece.singles)
    copied = [single for single in together if not is_small(single) and single.spec.is_contiguous]
    copies_us = 2 * sum(single.full_bytes for single in copied) * 1e6 / hardware.device.bytes_per_s
    return packed if saved_us > copies_us else apart


LEAST_LATENCIES = 4.0
"""A bucket is not split further once its bytes take less than this many times the latency of a collective."""
LEAST_LATENCIES_OF_PART = 100.0
"""The same for the graph of a part of a model, which is split wherever it is."""
NEAR = 1.002
"""A graph may end later by this factor before a unit is split for it."""
Groups = list[list[ParamCollective]]


@dataclasses.dataclass(frozen=True)
class Edges:
    """Times of a graph, which say what is at its edges.

    Attributes:
        before_us: The time of computing all nodes before one.
        total_us: The time of computing all.
        hardware: Of the links.
        whole: Whether the graph is all of its model.
    """

    before_us: dict[fx.Node, float]
    total_us: float
    hardware: Hardware
    whole: bool

    def split(self, groups: Groups, kind: Kind) -> Groups:
        """Splits groups that would delay the end of the graph.

        Those of gathers are in the order in which they are read, of reductions in that in which they are ready.
        """
        inwards = groups if kind is Kind.GATHER else groups[::-1]
        runs = [
            # A hook is called with all gradients of its unit at once.
            [group] if kind is Kind.REDUCE and any(s.spec.hook for s in group) else self._runs(group, kind)
            for group in inwards
        ]
        least_us, link_us = self.total_us, 0.0
        for run in itertools.chain.from_iterable(runs):
            link_us += self._time_us(run, kind)
            least_us = max(least_us, link_us + self._computing_us(run, kind))
        done: Groups = []
        link_us = 0.0
        for group, cut in zip(inwards, runs, strict=True):
            link_us += self._time_us(group, kind)
            late = link_us + self._computing_us(group, kind) > NEAR * least_us
            done += cut if late or not self.whole else [group]
        return done if kind is Kind.GATHER else done[::-1]

    def _computing_us(self, singles: Sequence[ParamCollective], kind: Kind) -> float:
        """Time of computing from the first use of any of them on, or until the last of their gradients is there."""
        before_us = [self.before_us[single.start] for single in singles]
        return self.total_us - min(before_us) if kind is Kind.GATHER else max(before_us)

    def _runs(self, singles: list[ParamCollective], kind: Kind) -> Groups:
        """Cuts a sequence, from the end that is nearer to the edge of the graph, into runs of enough bytes."""
        inwards = singles if kind is Kind.GATHER else singles[::-1]
        if kind is Kind.GATHER and not self.whole:
            inwards = by_offset(singles)
        # Small ones are one message, so they stay together.
        ordered = [s for s in inwards if is_small(s)] + [s for s in inwards if not is_small(s)]
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
        if kind is Kind.GATHER:
            return runs if self.whole else sorted(runs, key=lambda run: -self._computing_us(run, kind))
        return [run[::-1] for run in runs] if len(runs) > 1 else [singles]

    def _is_enough(self, shard_bytes: int, ranks: GroupRanks, kind: Kind) -> bool:
        latency_us = self.hardware.collective_us(kind.value, 0, ranks)
        least = LEAST_LATENCIES if self.whole else LEAST_LATENCIES_OF_PART
        return self._sending_us(shard_bytes, ranks, kind) >= (1 + least) * latency_us

    def _time_us(self, singles: Sequence[ParamCollective], kind: Kind) -> float:
        return self._sending_us(sum(map(_shard_bytes, singles)), singles[0].ranks, kind)

    def _sending_us(self, shard_bytes: int, ranks: GroupRanks, kind: Kind) -> float:
        return self.hardware.collective_us(kind.value, shard_bytes * (ranks.size - 1), ranks)


def _shard_bytes(single: ParamCollective) -> int:
    """Bytes of this rank's part of a parameter, as it is sent."""
    size_bytes: int = single.extent * single.sent.meta["val"].element_size()
    return size_bytes


def edges_of(step: StepGraph, hardware: Hardware, *, whole: bool) -> Edges:
    """Times of a graph in which nothing is scheduled yet, of all or a part of a model."""
    busy_us = times_us(step.graph, hardware, plan_kernels(step.graph, Fusion.KERNELS))
    reached = itertools.accumulate(busy_us.values(), initial=0.0)
    before_us = dict(zip(step.graph.nodes, reached, strict=False))
    return Edges(before_us, sum(busy_us.values()), hardware, whole)


def worth_joining_bytes(hardware: Hardware, ranks: GroupRanks) -> int:
    """Bytes of a message below which it pays to send two as one, in a group of some ranks.

    A message of this size takes `LEAST_LATENCIES` times as long on the link as the latency of its collective.
    """
    waiting_us = hardware.collective_us(Kind.GATHER.value, 0, ranks)
    return round(LEAST_LATENCIES * waiting_us * hardware.bytes_per_s(ranks) / 1e6)


def join_neighbours(groups: Groups, limit_bytes: int, partials: InputsByFlat) -> Groups:
    """Joins groups of one kind of collective with no large one between them, up to a limit of full bytes.

    They are in the order in which gathers are needed, or in which the last gradients are ready.
    """
    done: Groups = []
    open_bytes: dict[Hashable, tuple[list[ParamCollective], int]] = {}  # groups that more can join, and their bytes
    for group in groups:
        size_bytes = sum(single.full_bytes for single in group)
        if size_bytes > limit_bytes:
            # Joining across it would gather units long before, or reduce them long after, their own time.
            open_bytes.clear()
        kinds = {(collective_of(single), single.spec.reshard) for single in group}
        joins = len(kinds) == 1 and all(can_be_joined(single, partials) for single in group)
        kind = kinds.pop() if joins else None
        before, before_bytes = open_bytes.get(kind, ([], 0)) if joins else ([], 0)
        if before and before_bytes + size_bytes <= limit_bytes:
            before.extend(group)
            open_bytes[kind] = before, before_bytes + size_bytes
        else:
            done.append(list(group))
            open_bytes[kind] = done[-1], size_bytes
    return done


def can_be_joined(single: ParamCollective, partials: InputsByFlat) -> bool:
    """Whether a collective can be joined beyond its unit.

    A hook is called once for each unit. Post-forward shards and accumulated gradients belong to the flat parameters of
    one unit.
    """
    spec = single.spec
    return not (spec.hook or spec.post_forward_size > 1 or spec.compute or partials.of(single.flat) is not None)
