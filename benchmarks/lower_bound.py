"""A time, and a number of sent bytes, that no schedule of a training step can beat.

The schedules that are meant compute the same operators, in any order that their inputs allow, forward before backward.
Parameters are sharded at the beginning, gradients at the end. When and in which pieces parameters are gathered and
gradients are reduced, and which parameters stay gathered from forward to backward, is free, if gathered parameters and
full gradients never take more memory than is given. Every number below is at most what any of them needs:

- Before forward ends, this rank has received the others' part of every parameter that forward reads, at least once.
- At the seam between forward and backward it holds at most `room_bytes` of gathered parameters. What backward reads
  beyond that is received once more, after the seam. Ranks are alike, so what one receives in a step, one sends.
  So it takes at least until the seam, and what all of that and all gradients take on the link.
- Every gradient is sent once for its reduction (`reduce-scatter`, and over replicas the all-reduce of its shard, which
  together are the least for sums that end sharded on each replica).
- The link sends one byte after the other at its full rate: latencies are not counted, since buckets may be joined.
- An operator waits for the parameters that it and all that it depends on read. What depends on it is computed after it,
  and operators take turns: gathers, then computing. That is what the first gather cannot hide behind.
- A reduction starts behind all that its gradient depends on. So do those of all that depend on that gradient's
  operator: computing, then reductions. Weight gradients that do not lead to it may be computed meanwhile.

The last two ask only the reads and gradients at the edges of a graph, since a maximum over some of them is a bound as
well.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from torch import fx

from fsdp_compile.cost.communicate import communication
from fsdp_compile.cost.compute import NodeCost, node_costs
from fsdp_compile.cost.fusion import plan_kernels
from fsdp_compile.cost.hardware import Hardware, share_of_others
from fsdp_compile.cost.memory import Holder, Memory, memory_of_step
from fsdp_compile.cost.sizes import result_bytes
from fsdp_compile.explain.plan import Plan
from fsdp_compile.ir.graph import EXCHANGES, Phase, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import upstream
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.layout.wire_formats import gathered_bytes

EDGE: Final = 8
"""Reads and gradients at one edge of a graph that are asked."""


@dataclasses.dataclass(frozen=True)
class Read:
    """A parameter that a graph reads.

    Attributes:
        name: The same in each graph that reads the parameter.
        value: The node that is the full parameter; what reads it depends on it.
        size_bytes: Memory of the full parameter.
        sent_bytes: The part of it that other ranks send.
        again: Whether a graph that reads it after the seam receives it on this link, unless it was held.
    """

    name: Hashable
    value: int
    size_bytes: int
    sent_bytes: float
    again: bool = True


@dataclasses.dataclass(frozen=True)
class Made:
    """Gradients that may travel together: the nodes that compute them, and what is sent for their reduction."""

    nodes: tuple[int, ...]
    sent_bytes: float


@dataclasses.dataclass(frozen=True)
class Part:
    """One graph, as numbers.

    Attributes:
        times_us: Time of each node, in an order in which they can run.
        inputs: For each node, those whose results it takes.
        reads: In the order of `value`.
        made: In the order of their last nodes.
        sent_bytes: What nodes themselves send (exchanges of rows), besides.
    """

    times_us: tuple[float, ...]
    inputs: tuple[tuple[int, ...], ...]
    reads: tuple[Read, ...] = ()
    made: tuple[Made, ...] = ()
    sent_bytes: float = 0.0

    @property
    def compute_us(self) -> float:
        """Time of all nodes."""
        return sum(self.times_us)

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node, those that take its result."""
        found: list[list[int]] = [[] for _ in self.inputs]
        for node, sources in enumerate(self.inputs):
            for source in sources:
                found[source].append(node)
        return tuple(map(tuple, found))

    def before(self, node: int) -> set[int]:
        """A node and all that it depends on."""
        return _reached(node, self.inputs)

    def after(self, node: int) -> set[int]:
        """A node and all that depends on it."""
        return _reached(node, self.users)

    def time_us(self, nodes: Collection[int]) -> float:
        """Time of some nodes."""
        return sum(self.times_us[node] for node in nodes)


def _reached(start: int, neighbours: Sequence[Sequence[int]]) -> set[int]:
    found, todo = {start}, [start]
    while todo:
        for node in neighbours[todo.pop()]:
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step on one link.

    Attributes:
        forward: Its forward graphs in the order in which they run.
        backward: Its backward graphs in the order in which they run; none for an evaluation.
        room_bytes: Most memory of gathered parameters at the seam between forward and backward.
        bytes_per_us: What the link sends.
    """

    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    room_bytes: int
    bytes_per_us: float

    @property
    def least_bytes(self) -> float:
        """What each rank sends at least."""
        parts = (*self.forward, *self.backward)
        sent = sum(part.sent_bytes + sum(made.sent_bytes for made in part.made) for part in parts)
        return self._received(self._all(self.forward), self._all(self.backward)) + sent

    @property
    def least_us(self) -> float:
        """How long a step takes at least."""
        return max(self.least_bytes / self.bytes_per_us, *self._ends_us(), 0.0)

    def _all(self, parts: Iterable[Part]) -> Iterator[Read]:
        return (read for part in parts for read in part.reads)

    def _received(self, forward: Iterable[Read], backward: Iterable[Read]) -> float:
        """What has been received at least when so much of forward, and so much of backward, has been read."""
        once = {read.name: read.sent_bytes for read in forward}
        again = {read.name: read for read in backward if read.again}
        # Room for a byte spares at most what is sent for a byte.
        spared = max((r.sent_bytes / r.size_bytes for r in again.values() if r.size_bytes), default=0.0)
        held = self.room_bytes * spared
        return sum(once.values()) + max(0.0, sum(read.sent_bytes for read in again.values()) - held)

    def _bytes_after_seam(self) -> float:
        """What is sent at least after forward has ended."""
        sent = sum(part.sent_bytes + sum(made.sent_bytes for made in part.made) for part in self.backward)
        return self._received([], self._all(self.backward)) + sent

    def _ends_us(self) -> Iterator[float]:
        """Times before which a graph, or what is sent because of it, cannot be over."""
        parts, begin_us = (*self.forward, *self.backward), 0.0
        for number, part in enumerate(parts):
            if number == len(self.forward):
                yield begin_us + self._bytes_after_seam() / self.bytes_per_us
            later = sum(made.sent_bytes for other in parts[number + 1 :] for made in other.made)
            for computed_us, sent_bytes in _gradients(part):
                yield begin_us + computed_us + (sent_bytes + later) / self.bytes_per_us
            begin_us = max(begin_us + part.compute_us, *self._behind_gathers_us(number, part))
            yield begin_us

    def _behind_gathers_us(self, number: int, part: Part) -> Iterator[float]:
        yield 0.0
        seam = len(self.forward)
        for node in _readers_at_edges(part):
            before = part.before(node)
            mine = [read for read in part.reads if read.value in before]
            earlier = [*self._all((*self.forward, *self.backward)[:number])]
            if number < seam:
                received = self._received([*earlier, *mine], [])
            else:
                again = [*self._all(self.backward[: number - seam]), *mine]
                received = self._received(self._all(self.forward), again)
            yield received / self.bytes_per_us + part.time_us(part.after(node))


def _readers_at_edges(part: Part) -> Iterator[int]:
    """The first and the last parameters that are read, and the operators that read them, views left out."""
    for read in dict.fromkeys((*part.reads[:EDGE], *part.reads[-EDGE:])):
        yield read.value
        todo = [read.value]
        while todo:
            for user in part.users[todo.pop()]:
                if part.times_us[user]:
                    yield user
                else:
                    todo.append(user)


def _gradients(part: Part) -> Iterator[tuple[float, float]]:
    """For what computes the last gradients: the time until then, and the bytes that are sent after it."""
    for node in {node for made in part.made[-EDGE:] for node in made.nodes}:
        after = part.after(node)
        sent_bytes = sum(made.sent_bytes for made in part.made if after.issuperset(made.nodes))
        yield part.time_us(part.before(node)), sent_bytes


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
        rates[_over(node)] = max(rates.get(_over(node), 0.0), started.bytes_per_s, measured)
    reads = [
        (require(node).specs[0].group, _read(node, order[node])) for node in step.nodes(Role.FULL, Role.SAVED_PARAM)
    ]
    made = [_made(node, order, hardware) for node in step.nodes(Role.REDUCE, Role.REPLICATE)]
    made.sort(key=lambda of: max(of[1].nodes, default=0))
    sent_bytes = tuple((_over(node), communication(node, hardware).sent_bytes) for node in step.nodes(*EXCHANGES))
    held = max(memory.live_bytes(_SCHEDULED))
    return Outline(step.phase, held, Part(times_us, inputs), tuple(reads), tuple(made), sent_bytes, rates)


def _over(start: fx.Node) -> str:
    """The group whose ranks a collective connects: the same link, whatever other group sends on it."""
    spec = require(start).specs[0]
    if role_of(start) is Role.REPLICATE:
        return spec.replicate_group
    again = spec.post_forward_size > 1 and start.args[-1] == spec.post_forward_group
    return spec.post_forward_group if again else spec.group


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
    return _over(start), Made(tuple(sorted(order[node] for node in sources)), sent_bytes)


def lower_bound(plan: Plan) -> LowerBound:
    """The least time and bytes of any schedule with no more gathered parameters and full gradients than this one.

    Several groups send at once, and the slowest decides.
    """
    assert plan.traced is not None, "the plan of a model that has run"
    kernels = {step.graph: plan_kernels(step.graph, plan.traced.fusion) for steps in plan.steps for step in steps}
    memories = memory_of_step(plan.steps, lambda step: kernels[step.graph])
    outlines = [
        outline(step, node_costs(step.graph, plan.hardware, kernels[step.graph]), memory, plan.hardware)
        for steps, held in zip(plan.steps, memories, strict=True)
        for step, memory in zip(steps, held, strict=True)
    ]
    # Backward runs the regions in the opposite order.
    forwards = [of for of in outlines if of.phase is Phase.FORWARD]
    backwards = [of for of in reversed(outlines) if of.phase is Phase.BACKWARD]
    room_bytes = min(sum(of.scheduled_bytes for of in half) for half in (forwards, backwards))
    least_us, least_bytes = 0.0, 0.0
    groups = {group for of in outlines for group, _ in (*of.reads, *of.made, *of.sent_bytes)}
    for group in sorted(groups) or [""]:
        rate = max((of.rates.get(group, 0.0) for of in outlines), default=0.0) or math.inf
        forward, backward = (tuple(of.on(group) for of in half) for half in (forwards, backwards))
        step = Step(forward, backward, room_bytes, rate / 1e6)
        least_us, least_bytes = max(least_us, step.least_us), least_bytes + step.least_bytes
    return LowerBound(time_us=least_us, sent_bytes=least_bytes, room_bytes=room_bytes)
