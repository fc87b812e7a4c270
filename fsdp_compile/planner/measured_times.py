"""Corrects the times that a plan was made with by those that steps have taken, and says what a new plan would save.

A compiled graph that is measured notes when each of its calls of communication began and when it returned:

    start 0   compute   start 1   compute   wait 0   compute   wait 1
                                           ^      ^
                                        begin    end: collective 0 was over at the latest here

Where a wait held the graph up, its end is the end of the collective; where it did not, the collective was over by then.
Collectives of one group follow one another, so that for a link which takes `t` times as long as estimated, number `c`
ends at the latest of `start_j + t * (estimated times of j to c)`, over all `j` up to `c`: each end gives a `t`. Time
outside of these calls is computing. Plans depend on the ratio of the two alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from fsdp_compile.planner.list_schedule import Placement, place
from fsdp_compile.planner.problem import Problem
from fsdp_compile.planner.replay import replay

STEPS_PER_DOUBLING: Final = 4
"""Ratios are rounded to so many steps for a factor of two: less does not change plans, and ranks and runs agree."""
_MOST_DOUBLINGS: Final = 10
_FAR_OFF: Final = 2.0
_NO_STALL_US: Final = 30.0
"""What calling a wait takes although its collective is over."""
_NO_STALL_SHARE: Final = 0.1
"""The same, as a share of the collective's estimated time."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective of a graph.

    Attributes:
        queue: Alias of its process group, whose collectives follow one another.
        link: Alias of the group whose ranks it connects.
        time_us: As estimated.
    """

    queue: str
    link: str
    time_us: float


@dataclasses.dataclass(frozen=True)
class Call:
    """A start, or a wait: of the collective with this number, or of one that is not planned (`None`)."""

    waits: bool
    transfer: int | None


@dataclasses.dataclass(frozen=True)
class PlannedTimes:
    """What a plan expects of one graph.

    Attributes:
        after: Steps to measure before the plan may be made again.
        compute_us: As estimated.
        transfers: In the order of their starts.
        calls: Calls of communication in the order of the graph.
        budget_bytes: What the plan was made for.
    """

    after: int
    compute_us: float
    transfers: tuple[Transfer, ...]
    calls: tuple[Call, ...]
    problem: Problem
    placement: Placement
    budget_bytes: int


@dataclasses.dataclass(frozen=True)
class Mark:
    """One call of communication: whether it waits, when it began and when it returned, in us."""

    waits: bool
    begin_us: float
    end_us: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a graph: all of it, and its calls of communication."""

    whole: Mark
    marks: tuple[Mark, ...]

    @property
    def computed_us(self) -> float:
        """Time outside of calls of communication."""
        return _length_us(self.whole) - sum(map(_length_us, self.marks))

    def is_of(self, planned: PlannedTimes) -> bool:
        """Whether it has the calls of a plan, in its order."""
        return [mark.waits for mark in self.marks] == [call.waits for call in planned.calls]


Measured = Sequence[tuple[PlannedTimes, Run]]


def link_steps(measured: Measured) -> dict[str, int]:
    """How many times as long as estimated, beside computing, the collectives of each link take, in rounded steps."""
    computing = _computing(measured)
    seen: dict[str, list[_Seen]] = {}
    for planned, run in measured:
        for link, one in _seen(planned, run):
            seen.setdefault(link, []).append(one)
    return {link: _to_step(_times(ones, computing) / computing) for link, ones in seen.items() if computing > 0}


def _computing(measured: Measured) -> float:
    """How many times as long as estimated computing takes."""
    estimated_us = sum(planned.compute_us for planned, _ in measured)
    return sum(run.computed_us for _, run in measured) / estimated_us if estimated_us else 1.0


def times_of(step: int) -> float:
    """The factor that a rounded step stands for, to three digits, as it is written in graphs."""
    return float(f"{2 ** (step / STEPS_PER_DOUBLING):.3g}")


def gain(measured: Measured, times: Mapping[str, float], margin: float) -> float:
    """The part of the time of some graphs that a new plan saves, by the corrected estimate; 0 or more.

    Only the schedule is planned for this. Where a ratio is off by two or more, other passes may do otherwise as well
    (units that are split, gradients that are computed later): then all the time counts that neither lane needed.
    """
    now_us = new_us = 0.0
    for planned in {id(planned): planned for planned, _ in measured}.values():
        problem = planned.problem.slower(_mean(planned, times))
        now_us += replay(problem, planned.placement.issued, planned.placement.waits)
        new_us += place(problem, budget_bytes=planned.budget_bytes, margin=margin).end_us
    saved = max(0.0, 1.0 - new_us / now_us) if now_us else 0.0
    is_far_off = any(not 1 / _FAR_OFF < one < _FAR_OFF for one in times.values())
    return max(saved, _idle(measured, times)) if is_far_off else saved


def _idle(measured: Measured, times: Mapping[str, float]) -> float:
    """The part of measured runs that is more than all computing, and more than all collectives."""
    computing = _computing(measured)
    whole_us = busy_us = 0.0
    for planned, run in measured:
        link_us = sum(times.get(one.link, 1.0) * one.time_us for one in planned.transfers)
        busy_us += max(run.computed_us, computing * link_us)
        whole_us += _length_us(run.whole)
    return max(0.0, 1.0 - busy_us / whole_us) if whole_us else 0.0


def _mean(planned: PlannedTimes, times: Mapping[str, float]) -> float:
    """One factor for all links of a graph."""
    before_us = sum(one.time_us for one in planned.transfers)
    after_us = sum(times.get(one.link, 1.0) * one.time_us for one in planned.transfers)
    return after_us / before_us if before_us else 1.0


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What one collective says of its link: `times` as long as estimated; at most so long if it held nothing up."""

    times: float
    stalled: bool
    weight: float


def _times(seen: Sequence[_Seen], computing: float) -> float:
    stalled = sorted((one for one in seen if one.stalled), key=lambda one: one.times)
    if (
        not stalled
    ):  # as estimated, or as wrong as computing, whichever is slower, unless the link is known to be faster
        return min([max(1.0, computing), *(one.times for one in seen)])
    half = sum(one.weight for one in stalled) / 2
    for one in stalled:
        half -= one.weight
        if half <= 0:
            return one.times
    return stalled[-1].times


def _seen(planned: PlannedTimes, run: Run) -> Iterable[tuple[str, _Seen]]:
    starts: dict[str, list[tuple[float, float]]] = {}  # by queue: when each began, and estimated times before it
    sent_us: dict[str, float] = {}
    waited: set[int] = set()
    for call, mark in zip(planned.calls, run.marks, strict=True):
        if call.transfer is None:
            continue
        transfer = planned.transfers[call.transfer]
        before = starts.setdefault(transfer.queue, [])
        if not call.waits:
            before.append((mark.begin_us, sent_us.get(transfer.queue, 0.0)))
            sent_us[transfer.queue] = sent_us.get(transfer.queue, 0.0) + transfer.time_us
        elif call.transfer not in waited and transfer.time_us > 0:
            waited.add(call.transfer)
            stalled = _length_us(mark) > max(_NO_STALL_US, _NO_STALL_SHARE * transfer.time_us)
            number = sum(planned.transfers[i].queue == transfer.queue for i in range(call.transfer))
            until_us = before[number][1] + transfer.time_us
            times = min(
                (mark.end_us - start_us) / (until_us - earlier_us) for start_us, earlier_us in before[: number + 1]
            )
            yield transfer.link, _Seen(max(times, 0.0), stalled, transfer.time_us)


def _to_step(times: float) -> int:
    most = STEPS_PER_DOUBLING * _MOST_DOUBLINGS
    return most * -1 if times <= 0 else max(-most, min(most, round(STEPS_PER_DOUBLING * math.log2(times))))


def _length_us(mark: Mark) -> float:
    return mark.end_us - mark.begin_us
