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
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Final

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
