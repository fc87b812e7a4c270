"""Chooses when gathers start and when reductions are waited for, under a budget of bytes.

The graph is played once, step by step, on two lanes: compute, and the link. Before each step

- reductions that have completed are waited for, which costs nothing and frees their gradients;
- gathers start, in the order in which they are needed, if later would be too late (so as not to hold memory for
  longer than it hides time) and if they fit into the budget until they are needed;
- reductions whose gradients are ready start. One is waited for before it has completed only where the budget does
  not allow to hold its gradients any longer.

"Too late" is known from the end backwards: a gather must start so early that it, and every later one that queues
behind it, arrives in time. Where the link is the bottleneck that is always at once, and the budget decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from fsdp_compile.planner.problem import Gather, Problem


@dataclasses.dataclass(frozen=True)
class Placement:
    """A plan, by position.

    Attributes:
        starts: For each gather, where it starts.
        waits: For each reduction, where each of its stages is waited for.
        order: Stages as (reduction, stage), in the order in which they are waited for.
        peak_bytes: Most bytes that are held during any step.
        end_us: Estimated time until both lanes are done.
        bound_us: What no plan can beat.
    """

    starts: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    order: tuple[tuple[int, int], ...]
    peak_bytes: int
    end_us: float
    bound_us: float


class BudgetError(ValueError):
    """The budget is too small for any plan.

    Attributes:
        least_bytes: The smallest budget for which there is one.
        step: The step at which that much is held.
    """

    def __init__(self, budget_bytes: int, least_bytes: int, step: int) -> None:
        super().__init__(f"{budget_bytes} bytes are too few: step {step} holds {least_bytes}")
        self.least_bytes = least_bytes
        self.step = step


def place(problem: Problem, *, budget_bytes: int, margin: float = 1.0) -> Placement:
    """Plans one graph.

    Args:
        problem: The graph.
        budget_bytes: Most bytes of gathered parameters and full gradients that may be held during any step.
        margin: Times on the link are taken this much longer when deciding how early a gather must start.

    Raises:
        BudgetError: If even the plan that starts nothing early holds more than the budget.
    """
    live = problem.least_live_bytes()
    if live and max(live) > budget_bytes:
        raise BudgetError(budget_bytes, max(live), live.index(max(live)))
    latest_us = latest_starts_us(problem, margin)
    plans = [_Play(problem, live[:], room, latest_us).run() for room in _rooms(problem, budget_bytes)]
    return min(plans, key=lambda plan: (plan.end_us, plan.peak_bytes))


def latest_starts_us(problem: Problem, margin: float) -> list[float]:
    """When each gather must start at the latest, in time of computing without stalls; negative if that is too late.

    A gather occupies the link for `margin` times its duration; reductions that become ready between the needs of two
    gathers are served between them.
    """
    latest: list[float] = []
    following: Gather | None = None
    for gather in reversed(problem.gathers):
        must_end = problem.reached_us[gather.need]
        if following is not None:
            between = sum(sum(r.stages_us) for r in problem.reductions if gather.need <= r.ready < following.need)
            must_end = min(must_end, latest[-1] - between)
        latest.append(must_end - margin * gather.time_us)
        following = gather
    return latest[::-1]


@dataclasses.dataclass(frozen=True)
class _Room:
    """What may be held during each step.

    Attributes:
        budget_bytes: By gathers and reductions together.
        early_bytes: For each step, when a gather that is not needed yet asks; the rest is left to gradients.
    """

    budget_bytes: int
    early_bytes: Sequence[int]


def _rooms(problem: Problem, budget_bytes: int) -> Iterator[_Room]:
    """Ways to share the budget between gathers that start early and gradients that are on the link.

    Gathers may take it all, or leave room for the gradients that were ready last. Neither is always better: a
    reduction that must be waited for too early lets the link run dry, and so does a gather that starts too late.
    """
    steps = len(problem.steps_us)
    yield _Room(budget_bytes, [budget_bytes] * steps)
    if problem.reductions:
        ready = {reduction.ready: reduction.size_bytes for reduction in problem.reductions}
        early_bytes, latest = [], 0
        for step in range(steps):
            latest = ready.get(step, latest)
            early_bytes.append(budget_bytes - latest)
        yield _Room(budget_bytes, early_bytes)


class _Play:
    """One run through the steps; `live` holds the bytes of each step, as far as decided."""

    def __init__(self, problem: Problem, live: list[int], room: _Room, latest_us: list[float]) -> None:
        self.problem = problem
        self.live = live
        self.room = room
        self.latest_us = latest_us
        self.now_us = 0.0
        self.link_free_us = 0.0
        self.starts: list[int] = []
        self.gathered_us: list[float] = []
        self.awaited = 0
        self.in_flight: dict[int, float] = {}
        self.waits: list[list[int]] = [[] for _ in problem.reductions]
        self.order: list[tuple[int, int]] = []

    def run(self) -> Placement:
        reductions = list(enumerate(self.problem.reductions))[::-1]
        for position in range(len(self.problem.steps_us) + 1):
            self._collect(position)
            self._start_gathers(position)
            while reductions and reductions[-1][1].ready == position:
                index, reduction = reductions.pop()
                self.in_flight[index] = self._queue(reduction.stages_us[0])
            self._hold_or_wait(position)
            self._await_gathers(position)
            if position < len(self.problem.steps_us):
                self.now_us += self.problem.steps_us[position]
        waits = tuple(map(tuple, self.waits))
        end_us = max(self.now_us, self.link_free_us)
        peak_bytes = max(self.live, default=0)
        order = tuple(self.order)
        return Placement(tuple(self.starts), waits, order, peak_bytes, end_us, self.problem.bound_us)

    def _queue(self, time_us: float) -> float:
        self.link_free_us = max(self.now_us, self.link_free_us) + time_us
        return self.link_free_us

    def _collect(self, position: int) -> None:
        """Waits for what has completed."""
        for index in [i for i, end_us in self.in_flight.items() if end_us <= self.now_us]:
            self._wait(index, position)

    def _wait(self, index: int, position: int) -> None:
        """Waits for a stage of a reduction and starts the next one."""
        self.now_us = max(self.now_us, self.in_flight.pop(index))
        self.order.append((index, len(self.waits[index])))
        self.waits[index].append(position)
        stages_us = self.problem.reductions[index].stages_us
        if len(self.waits[index]) < len(stages_us):
            self.in_flight[index] = self._queue(stages_us[len(self.waits[index])])

    def _start_gathers(self, position: int) -> None:
        while len(self.starts) < len(self.problem.gathers):
            gather = self.problem.gathers[len(self.starts)]
            due = gather.need == position
            if not due and not (self._later_is_too_late(position) and self._fits(gather, position)):
                return
            for step in range(position, gather.need):
                self.live[step] += gather.early_bytes
            self.starts.append(position)
            self.gathered_us.append(self._queue(gather.time_us))

    def _later_is_too_late(self, position: int) -> bool:
        """Whether the next gather would arrive late if it started one position later."""
        step_us = self.problem.steps_us[position]
        queued_us = max(0.0, self.link_free_us - self.now_us - step_us)
        return self.problem.reached_us[position + 1] + queued_us > self.latest_us[len(self.starts)]

    def _fits(self, gather: Gather, position: int) -> bool:
        allowed = self.room.early_bytes
        return all(self.live[s] + gather.early_bytes <= allowed[s] for s in range(position, gather.need))

    def _hold_or_wait(self, position: int) -> None:
        """Holds the gradients that are on the link for one step more if they fit; the oldest go first if not."""
        last = position == len(self.problem.steps_us)
        while self.in_flight and (last or self.live[position] + self._gradient_bytes() > self.room.budget_bytes):
            self._wait(min(self.in_flight, key=self.in_flight.__getitem__), position)
        if not last:
            self.live[position] += self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        """Full gradients on the link: those whose first stage runs."""
        return sum(self.problem.reductions[i].size_bytes for i in self.in_flight if not self.waits[i])

    def _await_gathers(self, position: int) -> None:
        while self.awaited < len(self.starts) and self.problem.gathers[self.awaited].need == position:
            self.now_us = max(self.now_us, self.gathered_us[self.awaited])
            self.awaited += 1
