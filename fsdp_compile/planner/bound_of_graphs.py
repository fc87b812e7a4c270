"""What no schedule of a model's graphs can beat in the memory of theirs: `lower_bound.py`, with numbers of graphs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from torch import fx

from fsdp_compile.cost.communicate import communication
from fsdp_compile.cost.compute import NodeCost
from fsdp_compile.cost.formulas import share_of_others
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.cost.memory import Holder, Memory
from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.ir.graph import EXCHANGES, Phase, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import upstream
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.layout.wire_formats import gathered_bytes
from fsdp_compile.planner.lower_bound import Made, Part, Read, Step

_SCHEDULED = (Holder.UNSHARDED, Holder.GRADIENT)
"""Memory that depends on the schedule."""


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """What no schedule of the same graphs can beat in the memory of this one.

    Attributes:
        time_us: Of forward and backward.
        sent_bytes: Of one rank.
        room_bytes: The memory that is meant: most gathered parameters and full gradients at once, in the graphs that
            hold less of them, forward or backward.
    """

    time_us: float
    sent_bytes: float
    room_bytes: int


@dataclasses.dataclass(frozen=True)
class Outline:
    """One graph, with what it reads, makes and itself sends by the process group that connects the ranks.

    Attributes:
        scheduled_bytes: Most gathered parameters and full gradients at once.
        rates: The most bytes that a group sends in a second.
    """

    phase: Phase
    scheduled_bytes: int
    part: Part
    reads: tuple[tuple[str, Read], ...]
    made: tuple[tuple[str, Made], ...]
    sent_bytes: tuple[tuple[str, float], ...]
    rates: Mapping[str, float]

    def on(self, group: str) -> Part:
        """The graph, if only what this group sends takes time."""
        return dataclasses.replace(
            self.part,
            reads=tuple(read for by, read in self.reads if by == group),
            made=tuple(made for by, made in self.made if by == group),
            sent_bytes=sum((sent for by, sent in self.sent_bytes if by == group), 0.0),
        )


def outline(step: StepGraph, costs: Mapping[fx.Node, NodeCost], memory: Memory, hardware: Hardware) -> Outline:
    """Reads the numbers off a graph after the passes.

    Nodes of ours take no time, since another schedule may copy less; exchanges of rows count as bytes alone.
    """
    order = step.order()
    times_us = tuple(0.0 if role_of(node) is not None else costs[node].time_us for node in step.graph.nodes)
    inputs = tuple(tuple(order[source] for source in node.all_input_nodes) for node in step.graph.nodes)
    rates: dict[str, float] = {}
    for node in step.nodes(Role.FULL, Role.SAVED_PARAM, *EXCHANGES):
        spec = require(node).specs[0]
        rates[spec.group] = hardware.bytes_per_s(spec.shard_ranks)
    for node in step.nodes(Role.GATHER, Role.REDUCE, Role.REPLICATE):
        started = communication(node, hardware)
        # A measured collective may be faster than the rate of its link.
        measured = started.sent_bytes / started.alone_us * 1e6 if started.alone_us else 0.0
        rates[started.over] = max(rates.get(started.over, 0.0), started.bytes_per_s, measured)
    reads = [
        (require(node).specs[0].group, _read(node, order[node])) for node in step.nodes(Role.FULL, Role.SAVED_PARAM)
    ]
    made = [_made(node, order, hardware) for node in step.nodes(Role.REDUCE, Role.REPLICATE)]
    made.sort(key=lambda of: max(of[1].nodes, default=0))
    sent = [communication(node, hardware) for node in step.nodes(*EXCHANGES)]
    sent_bytes = tuple((one.over, one.sent_bytes) for one in sent)
    held = max(memory.live_bytes(_SCHEDULED))
    return Outline(step.phase, held, Part(times_us, inputs), tuple(reads), tuple(made), sent_bytes, rates)


def _read(node: fx.Node, value: int) -> Read:
    spec = require(node).specs[0]
    size_bytes = gathered_bytes(spec) * _numel(spec)
    return Read(
        name=require(node).claims[0],
        value=value,
        size_bytes=min(result_bytes(node), int(size_bytes)) or int(size_bytes),
        sent_bytes=size_bytes * share_of_others(spec.size),
        # What is kept over fewer ranks takes memory that is not counted, and is gathered on another link.
        again=spec.post_forward_size == 1,
    )


def _numel(spec: UnshardSpec) -> int:
    """Elements of a parameter in whole rows for each rank; every rank has all of a 0-d parameter."""
    return spec.shard_numel * spec.size if spec.dim is not None else 0


def _made(start: fx.Node, order: Mapping[fx.Node, int], hardware: Hardware) -> tuple[str, Made]:
    """A reduction, and the nodes of the model that compute its gradients."""
    record = require(start)
    sent = communication(start, hardware)
    ours = {start, *upstream(start, Role.GRADIENT)}
    sources = {source for node in ours for source in node.all_input_nodes} - ours
    full_bytes = sum(_numel(spec) * spec.reduce_dtype.itemsize for spec in record.specs)
    # An all-reduce of shards, which is behind the reduce-scatter: a reduce-scatter and an all-gather.
    least = 2 * full_bytes / record.specs[0].size if role_of(start) is Role.REPLICATE else full_bytes
    sent_bytes = min(least * share_of_others(sent.ranks), sent.sent_bytes)
    return sent.over, Made(tuple(sorted(order[node] for node in sources)), sent_bytes)


def lower_bound(outlines: Sequence[Outline]) -> LowerBound:
    """The least time and bytes of any schedule with no more gathered parameters and full gradients than this one.

    Args:
        outlines: In the order in which graphs run. Several groups send at once, and the slowest decides.
    """
    room_bytes = min(sum(of.scheduled_bytes for of in outlines if of.phase is phase) for phase in Phase)
    least_us, least_bytes = 0.0, 0.0
    groups = {group for of in outlines for group, _ in (*of.reads, *of.made, *of.sent_bytes)}
    for group in sorted(groups) or [""]:
        forward, backward = (tuple(of.on(group) for of in outlines if of.phase is phase) for phase in Phase)
        rate = max((of.rates.get(group, 0.0) for of in outlines), default=0.0) or math.inf
        step = Step(forward, backward, room_bytes, rate / 1e6)
        least_us, least_bytes = max(least_us, step.least_us), least_bytes + step.least_bytes
    return LowerBound(time_us=least_us, sent_bytes=least_bytes, room_bytes=room_bytes)
