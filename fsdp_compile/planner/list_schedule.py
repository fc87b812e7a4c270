"""Chooses when all-gathers start and when reductions are waited for, under a budget of bytes.

The graph is simulated once, step by step, on two lanes: compute, and the link. (Offloaded units add the bus to the
host.) Before each step

- reductions that have surely completed are waited for, which costs nothing and frees their gradients;
- gathers start, in the order in which they are needed, if later could be too late (so as not to take memory for much
  longer than they hide time) and if they fit into the budget until they are needed;
- copies from the host start by the same rule, so early that each is complete when its gather starts; before that, a
  gather starts only if it is needed at once;
- a gather does not start if an exchange of rows, which computing waits for at once, would have to wait for it;
- reductions whose gradients are ready start. One is waited for before it has surely completed only where the budget
  has no room for its gradients any longer.

"Too late" is known from the end backwards: a gather must start so early that it, and every later one that queues behind
it, is complete in time. Where the link is the bottleneck that is always at once, and the budget decides.

"Surely" and "could" allow for a link that is `margin` times slower than estimated: a gather that starts too early costs
memory that the budget has, one that starts too late stops the computation. For the same reason plans are made for links
that are slower by `margin` and by its square as well, and the one is taken that loses least on any of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from fsdp_compile.planner.problem import Gather, Problem, Start, What

Stage = tuple[int, int]
"""A reduction and one of its stages, by number."""
T = TypeVar("T", bound=Hashable)


def _latest_gathers_us(problem: Problem, margin: float) -> list[float]:
    """When each gather must start at the latest so that computing does not wait; negative if that is too late.

    In time of computing without stalls, on a link and a bus that take `margin` times longer.
    """
    # Reductions that become ready between the needs of two gathers are served between them.
    ready = [reduction.ready for reduction in problem.reductions]
    latest: list[float] = []
    following: Gather | None = None
    for gather in reversed(problem.gathers):
        must_end = problem.reached_us[gather.need]
        if following is not None:
            served = slice(bisect.bisect_left(ready, gather.need), bisect.bisect_left(ready, following.need))
            between = sum(sum(r.stages_us) for r in problem.reductions[served])
            must_end = min(must_end, latest[-1] - between)
        latest.append(must_end - margin * gather.time_us)
        following = gather
    return latest[::-1]


def _latest_copies_us(problem: Problem, margin: float, gathers_us: Sequence[float]) -> list[float]:
    """The same for the copies from the host: each is complete when its gather must start; the bus is shared."""
    latest: list[float] = []
    must_end = float("inf")
    for gather, gather_us in zip(reversed(problem.gathers), reversed(gathers_us), strict=True):
        must_end = min(must_end, gather_us) - margin * gather.copy_us
        latest.append(must_end)
    return latest[::-1]


@dataclasses.dataclass(frozen=True)
class Placement:
    """A plan, by position.

    Attributes:
        starts: For each gather, where it starts.
        issued: The starts of gathers and of copies from the host, in order.
        waits: For each reduction, where each of its stages is waited for.
        order: Stages as (reduction, stage), in the order in which they are waited for.
        end_us: Estimated time until both lanes are done.
    """

    starts: tuple[int, ...]
    issued: tuple[Start, ...]
    waits: tuple[tuple[int, ...], ...]
    order: tuple[Stage, ...]
    peak_bytes: int
    end_us: float


class BudgetError(ValueError):
    """The budget is too small for any plan; `step` needs `least_bytes`, the smallest budget for which there is one."""

    def __init__(self, budget_bytes: int, least_bytes: int, step: int) -> None:
        super().__init__(f"{budget_bytes} bytes are too few: step {step} holds {least_bytes}")
        self.least_bytes = least_bytes
        self.step = step


def place(problem: Problem, *, budget_bytes: int, margin: float = 1.0) -> Placement:
    """Plans one graph.

    Args:
        problem: The graph.
        budget_bytes: Most bytes of gathered parameters and full gradients that may be live during any step.
        margin: Times on the link are taken this much longer when deciding how early a gather must start.

    Raises:
        BudgetError: If even the plan that starts nothing early needs more than the budget.
    """
    live = problem.least_live_bytes()
    if live and max(live) > budget_bytes:
        raise BudgetError(budget_bytes, max(live), live.index(max(live)))
    links = sorted({1.0, margin, margin**2})
    plans = [
        _Play(problem.slower(times), live[:], budget_bytes, early_bytes, margin)
        for times in links
        for early_bytes in _shares_of_gathers(problem, budget_bytes)
    ]
    for plan in plans:
        plan.run()
    chosen = _most_robust(problem, plans, links)
    return Placement(
        starts=tuple(chosen.starts),
        issued=tuple(chosen.issued),
        waits=tuple(map(tuple, chosen.waits)),
        order=tuple(chosen.order),
        peak_bytes=chosen.peak_bytes,
        end_us=replay(problem, chosen.issued, chosen.waits),
    )


def _most_robust(problem: Problem, plans: Sequence[_Play], links: Sequence[float]) -> _Play:
    """The plan that loses least against the best one on any of `links`; of equals, the smallest."""
    ends_us = [[replay(problem.slower(times), plan.issued, plan.waits) for times in links] for plan in plans]
    best_us = [min(column) for column in zip(*ends_us, strict=True)]
    losses = [max(end / best if best else 1.0 for end, best in zip(row, best_us, strict=True)) for row in ends_us]
    # Rounded, so that a difference below what estimates can tell does not cost memory.
    return min(zip(losses, plans, strict=True), key=lambda pair: (round(pair[0], 3), pair[1].peak_bytes))[1]


def _shares_of_gathers(problem: Problem, budget_bytes: int) -> Iterator[Sequence[int]]:
    """Ways to share the budget between gathers that start early and gradients that are on the link.

    Each says what may be live during each step with a gather that is not needed yet; the rest is left to gradients.
    Gathers may take it all, or leave room for the gradients that were ready last. Neither is always better: a reduction
    that must be waited for too early lets the link run dry, and so does a gather that starts too late.
    """
    steps = len(problem.steps_us)
    yield [budget_bytes] * steps
    if problem.reductions:
        early_bytes, latest = [], 0
        for step in range(steps):
            latest = problem.ready_bytes.get(step, latest)
            early_bytes.append(budget_bytes - latest)
        yield early_bytes


@dataclasses.dataclass(frozen=True)
class _Running:
    """When a collective that is on the link ends, and when it has ended even if the link is `margin` times slower."""

    ends_us: float
    surely_ends_us: float


class _Play:
    """One simulation of the steps.

    `live` has the bytes of each step, as far as decided; they may reach `budget_bytes`, and with a gather that is not
    needed yet `early_bytes` of the step.
    """

    def __init__(
        self, problem: Problem, live: list[int], budget_bytes: int, early_bytes: Sequence[int], margin: float
    ) -> None:
        self.problem = problem
        self.live = live
        self.budget_bytes = budget_bytes
        self.early_bytes = early_bytes
        self.latest_gathers_us = _latest_gathers_us(problem, margin)
        self.latest_copies_us = _latest_copies_us(problem, margin, self.latest_gathers_us)
        self.margin = margin
        self.ready_bytes = problem.ready_bytes
        self.exchanges = sorted(problem.exchanges)
        self.now_us = 0.0
        self.link_free_us = 0.0
        self.link_surely_free_us = 0.0
        self.in_free_us = 0.0  # the bus, from the host
        self.starts: list[int] = []
        self.issued: list[Start] = []
        self.copied_us: list[float] = []
        self.gathered_us: list[float] = []
        self.awaited = 0
        self.in_flight: dict[int, _Running] = {}  # in the order in which they end, that of the link
        self.gradient_bytes = 0  # of reductions on the link: full gradients, those whose first stage runs, and results
        self.waits: list[list[int]] = [[] for _ in problem.reductions]
        self.order: list[Stage] = []

    @property
    def peak_bytes(self) -> int:
        """Most bytes during a step."""
        return max(self.live, default=0)

    def run(self) -> None:
        """Decides everything, step by step."""
        reductions = list(enumerate(self.problem.reductions))[::-1]
        for position in range(len(self.problem.steps_us) + 1):
            self._wait_for_completed(position)
            self._start_copies(position)
            self._start_gathers(position)
            while reductions and reductions[-1][1].ready == position:
                index, reduction = reductions.pop()
                self.in_flight[index] = self._queue(reduction.stages_us[0])
                self.gradient_bytes += reduction.held_bytes(0)
            self._hold_or_wait(position)
            while self.awaited < len(self.starts) and self.problem.gathers[self.awaited].need == position:
                self.now_us = max(self.now_us, self.gathered_us[self.awaited])
                self.awaited += 1
            if position in self.problem.exchanges:
                self.now_us = self._queue(self.problem.steps_us[position]).ends_us
            elif position < len(self.problem.steps_us):
                self.now_us += self.problem.steps_us[position]

    def _queue(self, time_us: float) -> _Running:
        self.link_free_us = max(self.now_us, self.link_free_us) + time_us
        self.link_surely_free_us = max(self.now_us, self.link_surely_free_us) + self.margin * time_us
        return _Running(self.link_free_us, self.link_surely_free_us)

    def _wait_for_completed(self, position: int) -> None:
        now_us = self.now_us
        for index in list(itertools.takewhile(lambda i: self.in_flight[i].surely_ends_us <= now_us, self.in_flight)):
            self._wait(index, position)

    def _wait(self, index: int, position: int) -> None:
        """Waits for a stage of a reduction and starts the next one."""
        self.now_us = max(self.now_us, self.in_flight.pop(index).ends_us)
        self.order.append((index, len(self.waits[index])))
        reduction, stage = self.problem.reductions[index], len(self.waits[index])
        self.gradient_bytes -= reduction.held_bytes(stage)
        self.waits[index].append(position)
        if stage + 1 < len(reduction.stages_us):
            self.in_flight[index] = self._queue(reduction.stages_us[stage + 1])
            self.gradient_bytes += reduction.held_bytes(stage + 1)

    def _start_copies(self, position: int) -> None:
        """Starts copies for later gathers that would be late if they started one position later."""
        while len(self.copied_us) < len(self.problem.gathers):
            index = len(self.copied_us)
            gather = self.problem.gathers[index]
            early = bool(gather.copy_us) and position < gather.need
            if not (early and self._is_too_late(position, self.in_free_us, self.latest_copies_us[index])):
                return
            if not self._fits(gather.copy_bytes, position, gather.need):
                return
            self._copy(gather, position)

    def _copy(self, gather: Gather, position: int) -> None:
        """Starts the next copy, if its gather sends one."""
        if gather.copy_us:
            self.issued.append(Start(What.COPY, len(self.copied_us), position))
            self.in_free_us = max(self.now_us, self.in_free_us) + gather.copy_us
        self._hold(gather.copy_bytes, position, gather.need)
        self.copied_us.append(self.in_free_us if gather.copy_us else 0.0)

    def _start_gathers(self, position: int) -> None:
        while len(self.starts) < len(self.problem.gathers):
            index = len(self.starts)
            gather = self.problem.gathers[index]
            if gather.need != position and not self._may_start_early(gather, index, position):
                return
            if index == len(self.copied_us):
                self._copy(gather, position)
            # From `need` on `least_live_bytes` counts the result already.
            self._hold(gather.early_bytes - gather.copy_bytes, position, gather.need)
            self.now_us = max(self.now_us, self.copied_us[index])
            self.starts.append(position)
            self.issued.append(Start(What.GATHER, index, position))
            self.gathered_us.append(self._queue(gather.time_us).ends_us)
            self._start_copies(position)

    def _may_start_early(self, gather: Gather, index: int, position: int) -> bool:
        started = index < len(self.copied_us)
        if gather.copy_us:
            # Compute waits at a position for the gathers that are needed there, whatever else starts.
            running = zip(self.gathered_us[self.awaited :], self.problem.gathers[self.awaited :], strict=False)
            stands_until_us = max([self.now_us, *(end_us for end_us, other in running if other.need == position)])
            if not (started and self.copied_us[index] <= stands_until_us):
                return False
        more_bytes = gather.early_bytes - gather.copy_bytes * started
        # Computing waits for an exchange at once: it must not queue behind a gather that is not needed yet.
        if self._delays_exchange(gather, position):
            return False
        late = self._is_too_late(position, self.link_free_us, self.latest_gathers_us[index])
        # While a gather starts here, the gradients of reductions that start here are still in memory.
        at_once_bytes = self.live[position] + self.ready_bytes.get(position, 0) + more_bytes
        return late and at_once_bytes <= self.budget_bytes and self._fits(more_bytes, position, gather.need)

    def _delays_exchange(self, gather: Gather, position: int) -> bool:
        """Whether a gather would still be on the link when an exchange that comes before its use is reached."""
        coming = [step for step in self.exchanges if position <= step < gather.need]
        if not coming:
            return False
        reached_us = self.now_us + self.problem.reached_us[coming[0]] - self.problem.reached_us[position]
        return max(self.now_us, self.link_free_us) + gather.time_us > reached_us

    def _is_too_late(self, position: int, free_us: float, latest_us: float) -> bool:
        """Whether what queues on a lane that is free at `free_us` would be late if it started one position later."""
        step_us = self.problem.steps_us[position]
        queued_us = max(0.0, free_us - self.now_us - step_us)
        return self.problem.reached_us[position + 1] + queued_us > latest_us

    def _fits(self, size_bytes: int, position: int, need: int) -> bool:
        steps = zip(self.live[position:need], self.early_bytes[position:need], strict=False)
        return all(held_bytes + size_bytes <= most for held_bytes, most in steps)

    def _hold(self, size_bytes: int, position: int, need: int) -> None:
        if size_bytes:
            self.live[position:need] = [held_bytes + size_bytes for held_bytes in self.live[position:need]]

    def _hold_or_wait(self, position: int) -> None:
        """Leaves gradients on the link for one more step if they fit, else waits for the oldest."""
        last = position == len(self.problem.steps_us)
        while self.in_flight and (last or self.live[position] + self.gradient_bytes > self.budget_bytes):
            self._wait(next(iter(self.in_flight)), position)
        if not last:
            self.live[position] += self.gradient_bytes


def replay(problem: Problem, issued: Sequence[Start], waits: Sequence[Sequence[int]]) -> float:
    """Time of a graph in us with a given plan; `waits` has, for each reduction, where its stages are waited for."""
    return _Replay(problem).run(issued, waits)


class _Replay:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.now_us = 0.0
        self.link_free_us = 0.0
        self.in_free_us = 0.0  # the bus, from the host
        self.out_free_us = 0.0  # the bus, to the host
        self.running: dict[Stage, float] = {}
        self.copied_us: dict[int, float] = {}
        self.gathered_us: dict[int, float] = {}

    def run(self, issued: Sequence[Start], waits: Sequence[Sequence[int]]) -> float:
        steps_us, exchanges = self.problem.steps_us, self.problem.exchanges
        needed = _by_place((gather.need, index) for index, gather in enumerate(self.problem.gathers))
        ready = _by_place((reduction.ready, index) for index, reduction in enumerate(self.problem.reductions))
        starting = _by_place((start.position, start) for start in issued)
        due = _by_place((at, (index, k)) for index, stages in enumerate(waits) for k, at in enumerate(stages))
        begin = 0
        for position in sorted(needed.keys() | ready.keys() | starting.keys() | due.keys() | exchanges):
            self._compute(begin, position)
            begin = position + (position in exchanges)
            waited = due.get(position, [])
            # A schedule waits for completed reductions before it starts anything, as `place` does.
            self._wait_for_all([s for s in waited if s in self.running and self.running[s] <= self.now_us])
            for start in starting.get(position, ()):
                self._issue(start)
            for index in ready.get(position, ()):
                self.running[index, 0] = self._queue(self.problem.reductions[index].stages_us[0])
            while left := [stage for stage in waited if stage in self.running]:
                self._wait_for_all([min(left, key=self.running.__getitem__)])
            self.now_us = max([self.now_us, *(self.gathered_us[index] for index in needed.get(position, ()))])
            if position in exchanges:
                self.now_us = self._queue(steps_us[position])
        self._compute(begin, len(steps_us))
        return max(self.now_us, self.link_free_us, self.out_free_us)

    def _compute(self, begin: int, end: int) -> None:
        for step_us in self.problem.steps_us[begin:end]:
            self.now_us += step_us  # step by step, as `place` adds them up: `sum` rounds otherwise in newer Pythons

    def _issue(self, start: Start) -> None:
        gather = self.problem.gathers[start.gather]
        if start.what is What.COPY:
            self.in_free_us = max(self.now_us, self.in_free_us) + gather.copy_us
            self.copied_us[start.gather] = self.in_free_us
        else:
            self.now_us = max(self.now_us, self.copied_us.get(start.gather, 0.0))
            self.gathered_us[start.gather] = self._queue(gather.time_us)

    def _queue(self, time_us: float) -> float:
        self.link_free_us = max(self.now_us, self.link_free_us) + time_us
        return self.link_free_us

    def _wait_for_all(self, stages: Sequence[Stage]) -> None:
        for index, number in sorted(stages, key=self.running.__getitem__):
            self.now_us = max(self.now_us, self.running.pop((index, number)))
            reduction = self.problem.reductions[index]
            if number + 1 < len(reduction.stages_us):
                self.running[index, number + 1] = self._queue(reduction.stages_us[number + 1])
            elif reduction.copy_us:
                self.out_free_us = max(self.now_us, self.out_free_us) + reduction.copy_us


def _by_place(placed: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for place, what in placed:
        found.setdefault(place, []).append(what)
    return found
