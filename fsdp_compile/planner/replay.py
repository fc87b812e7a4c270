"""The time that a graph takes with a given plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from fsdp_compile.planner.problem import Problem, Start, What

Stage = tuple[int, int]
"""A reduction and one of its stages, by number."""
T = TypeVar("T", bound=Hashable)


def replay(problem: Problem, issued: Sequence[Start], waits: Sequence[Sequence[int]]) -> float:
    """Time of a graph in us; `waits` has, for each reduction, where each of its stages is waited for."""
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
        needed = _by_place((gather.need, index) for index, gather in enumerate(self.problem.gathers))
        ready = _by_place((reduction.ready, index) for index, reduction in enumerate(self.problem.reductions))
        starting = _by_place((start.position, start) for start in issued)
        due = _by_place((at, (index, k)) for index, stages in enumerate(waits) for k, at in enumerate(stages))
        begin = 0
        for position in sorted(needed.keys() | ready.keys() | starting.keys() | due.keys() | self.problem.exchanges):
            self._compute(begin, position)
            begin = position + (position in self.problem.exchanges)
            waited = due.get(position, [])
            # A schedule waits for completed reductions before it starts anything, as `list_schedule` does.
            self._wait_for_all([s for s in waited if s in self.running and self.running[s] <= self.now_us])
            for start in starting.get(position, ()):
                self._issue(start)
            for index in ready.get(position, ()):
                self._start((index, 0))
            while left := [stage for stage in waited if stage in self.running]:
                self._wait_for_all([min(left, key=self.running.__getitem__)])
            self.now_us = max([self.now_us, *(self.gathered_us[index] for index in needed.get(position, ()))])
            if position in self.problem.exchanges:
                self.now_us = self._queue(self.problem.steps_us[position])
        self._compute(begin, len(self.problem.steps_us))
        return max(self.now_us, self.link_free_us, self.out_free_us)

    def _compute(self, begin: int, end: int) -> None:
        """Advances from one position to another; between them nothing starts and nothing is waited for."""
        now_us = self.now_us
        for step_us in self.problem.steps_us[begin:end]:
            now_us += step_us
        self.now_us = now_us

    def _issue(self, start: Start) -> None:
        gather = self.problem.gathers[start.gather]
        if start.what is What.COPY:
            self.in_free_us = max(self.now_us, self.in_free_us) + gather.copy_us
            self.copied_us[start.gather] = self.in_free_us
        else:
            self.now_us = max(self.now_us, self.copied_us.get(start.gather, 0.0))
            self.gathered_us[start.gather] = self._queue(gather.time_us)

    def _start(self, stage: Stage) -> None:
        index, number = stage
        self.running[stage] = self._queue(self.problem.reductions[index].stages_us[number])

    def _queue(self, time_us: float) -> float:
        self.link_free_us = max(self.now_us, self.link_free_us) + time_us
        return self.link_free_us

    def _wait_for_all(self, stages: Sequence[Stage]) -> None:
        for index, number in sorted(stages, key=self.running.__getitem__):
            self.now_us = max(self.now_us, self.running.pop((index, number)))
            if number + 1 < len(self.problem.reductions[index].stages_us):
                self._start((index, number + 1))
            elif copy_us := self.problem.reductions[index].copy_us:
                self.out_free_us = max(self.now_us, self.out_free_us) + copy_us


def _by_place(placed: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for place, what in placed:
        found.setdefault(place, []).append(what)
    return found
