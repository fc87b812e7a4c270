"""What the planner has to know of one graph.

A graph is a row of steps, each of which computes for some time. Position `p` is the moment right before step `p`;
position `n` is the end of a graph of `n` steps. All collectives share one link, which serves them in the order in which
they are started: an estimate where reductions have a group of their own and share the link with gathers instead. Copies
between host and device share a bus, one queue in each direction.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

_BESIDE: Final = 4096
"""One byte in so many is left for memory outside of graphs: the loss and its gradient, seeds, unread buffers."""


def of_graphs(budget_bytes: int) -> int:
    """The part of a budget that a graph may use, in bytes."""
    return budget_bytes - budget_bytes // _BESIDE


def for_graphs(held_bytes: int) -> int:
    """A budget under which a graph may use so many bytes: `of_graphs(for_graphs(n)) >= n`."""
    return held_bytes + math.ceil(held_bytes / (_BESIDE - 1))


class What(enum.Enum):
    """What is started for a bucket that is gathered."""

    COPY = "copy"
    """The copy from the host that the gather sends."""
    GATHER = "gather"


@dataclasses.dataclass(frozen=True)
class Start:
    """One start: of what, for which gather, at which position."""

    what: What
    gather: int
    position: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gather:
    """One bucket's all-gather.

    Attributes:
        need: Position at which its result must be there.
        free: Position at which its result is freed; the number of steps if it leaves the graph.
        size_bytes: Memory of the result, from the start of the gather until `free`.
        sent_bytes: Memory of the message that this rank sends, from the start until `need`.
        copy_us: Time on the bus of the copy from the host that it sends; 0 if it sends none.
        copy_bytes: Memory of that copy, a part of `sent_bytes`, from the start of the copy.
        kept: Whether the result is saved for backward, because there is room: then `free` is where it is used last, and
            it is in memory until the end.
        unit: Name of the unit's bucket that it is, or is a part of where that was split; empty for one by itself.
    """

    need: int
    free: int
    size_bytes: int
    time_us: float
    sent_bytes: int = 0
    copy_us: float = 0.0
    copy_bytes: int = 0
    kept: bool = False
    unit: str = ""

    @property
    def early_bytes(self) -> int:
        """Memory that an earlier start takes earlier."""
        return self.size_bytes + self.sent_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """One bucket's reduce-scatter, and the all-reduce over replicas that follows it in hybrid sharding.

    Attributes:
        born: Position at which the first of its gradients is computed.
        ready: Position at which the last one is, so that the first stage can start.
        size_bytes: Memory of the full gradients, from `born` until the first stage is waited for.
        stages_us: Time on the link of each stage; one starts where the one before it has been waited for.
        copy_us: Time on the bus of the copies to the host that follow; 0 if there are none.
        unit: As of a gather.
        late_bytes: Where everything counts, memory of each stage while it runs longer than if it were waited for at
            once: what it sends, and results and copies that are freed again. If empty, only `size_bytes` counts.
    """

    born: int
    ready: int
    size_bytes: int
    stages_us: tuple[float, ...]
    copy_us: float = 0.0
    unit: str = ""
    late_bytes: tuple[int, ...] = ()

    def held_bytes(self, stage: int) -> int:
        """Memory from the start of a stage until it is waited for."""
        return self.late_bytes[stage] if self.late_bytes else self.size_bytes * (stage == 0)


T = TypeVar("T", Gather, Reduction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """One bucket that forward saved: in memory from the beginning until `free`, and not gathered in backward."""

    need: int
    free: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """One graph.

    Attributes:
        steps_us: Time of each step when nothing else uses what it needs.
        gathers: In the order of `need`.
        reductions: In the order of `ready`.
        least_bytes: All live bytes during each step, if nothing starts early and everything is waited for at once. If
            empty, only the memory of these gathers, reductions and saved buckets counts.
        exchanges: Steps that send on the link instead of computing, and that compute waits for.
    """

    steps_us: tuple[float, ...]
    gathers: tuple[Gather, ...]
    reductions: tuple[Reduction, ...]
    least_bytes: tuple[int, ...] = ()
    saved: tuple[Saved, ...] = ()
    exchanges: frozenset[int] = frozenset()

    @functools.cached_property
    def reached_us(self) -> tuple[float, ...]:
        """For each position, the time of all steps before it."""
        return tuple(itertools.accumulate(self.steps_us, initial=0.0))

    @functools.cached_property
    def ready_bytes(self) -> Mapping[int, int]:
        """Of reductions that start at a position: live, or about to be, beside whatever starts there before them."""
        found: dict[int, int] = {}
        for reduction in self.reductions:
            found[reduction.ready] = found.get(reduction.ready, 0) + reduction.held_bytes(0)
        return found

    @property
    def compute_us(self) -> float:
        """Time of all steps, exchanges among them."""
        return self.reached_us[-1]

    def slower(self, times: float) -> Problem:
        """The same graph on a link that takes so many times as long."""
        gathers = tuple(dataclasses.replace(g, time_us=times * g.time_us) for g in self.gathers)
        reductions = tuple(
            dataclasses.replace(r, stages_us=tuple(times * us for us in r.stages_us)) for r in self.reductions
        )
        steps_us = tuple(times * us if step in self.exchanges else us for step, us in enumerate(self.steps_us))
        return dataclasses.replace(self, steps_us=steps_us, gathers=gathers, reductions=reductions)

    def least_live_bytes(self) -> list[int]:
        """Live bytes during each step, if nothing starts early and everything is waited for at once."""
        if self.least_bytes:
            return list(self.least_bytes)
        end = len(self.steps_us)
        held = [(g.need, end if g.kept else g.free, g.size_bytes) for g in self.gathers]
        held += [(0, saved.free, saved.size_bytes) for saved in self.saved]
        return self.sums([*held, *((r.born, r.ready, r.size_bytes) for r in self.reductions)])

    def in_use_bytes(self) -> list[int]:
        """The same if every bucket were resharded after forward, and no unit were split."""
        gathered = [(min(g.need for g in unit), max(g.free for g in unit), _bytes(unit)) for unit in self._gathered]
        kept = [(saved.need, saved.free, saved.size_bytes) for saved in self.saved]
        reduced = [(min(r.born for r in unit), max(r.ready for r in unit), _bytes(unit)) for unit in self._reduced]
        return self.sums([*gathered, *kept, *reduced])

    @property
    def promised_bytes(self) -> int:
        """Most live bytes without a budget of the user's: what is in use at once, and one more bucket of each kind.

        Units count whole, so that splitting one, which is done where the link is slow, takes no room from the plan.
        """
        gathered = [*map(_bytes, self._gathered), *(saved.size_bytes for saved in self.saved)]
        gradients = map(_bytes, self._reduced)
        return max(self.in_use_bytes(), default=0) + max(gathered, default=0) + max(gradients, default=0)

    @functools.cached_property
    def _gathered(self) -> list[list[Gather]]:
        return _by_unit(self.gathers)

    @functools.cached_property
    def _reduced(self) -> list[list[Reduction]]:
        return _by_unit(self.reductions)

    def sums(self, held: Iterable[tuple[int, int, int]]) -> list[int]:
        """Bytes during each step of what is held from one position to another."""
        change = [0] * (len(self.steps_us) + 1)
        for begin, end, size_bytes in held:
            change[begin] += size_bytes
            change[end] -= size_bytes
        return list(itertools.accumulate(change[:-1]))


def _by_unit(parts: Iterable[T]) -> list[list[T]]:
    """Buckets that are parts of one unit, together."""
    found: dict[object, list[T]] = {}
    for number, part in enumerate(parts):
        found.setdefault(part.unit or number, []).append(part)
    return list(found.values())


def _bytes(unit: Iterable[Gather | Reduction]) -> int:
    return sum(part.size_bytes for part in unit)
