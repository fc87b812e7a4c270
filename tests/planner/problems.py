"""Random planning problems, and a second way to play a plan."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from fsdp_compile.cost.timeline import Compute, Event, Start, Wait, simulate
from fsdp_compile.planner.problem import Gather, Problem, Reduction, Saved, What
from fsdp_compile.planner.problem import Start as Issue

_times = st.integers(0, 9).map(float)
_sizes = st.integers(1, 9)
_stages = st.lists(_times, min_size=1, max_size=2).map(tuple)


@st.composite
def problems(draw: st.DrawFn, *, steps: int = 8, collectives: int = 4, offloaded: bool = True) -> Problem:
    """Problems of up to so many steps and so many collectives of each kind; some copy shards and gradients."""
    count = draw(st.integers(1, steps))
    places = st.integers(0, count)
    gathers, reductions = [], []
    for _ in range(draw(st.integers(0, collectives))):
        need = draw(st.integers(0, count - 1))
        free = draw(st.integers(need + 1, count))
        sent_bytes = draw(_sizes)
        copy_us, copy_bytes = (draw(_times), draw(st.integers(0, sent_bytes))) if offloaded else (0.0, 0)
        gathers.append(
            Gather(
                need=need,
                free=free,
                size_bytes=draw(_sizes),
                time_us=draw(_times),
                sent_bytes=sent_bytes,
                copy_us=copy_us,
                copy_bytes=copy_bytes if copy_us else 0,
                kept=draw(st.booleans()),
            )
        )
    for _ in range(draw(st.integers(0, collectives))):
        born, ready = sorted((draw(places), draw(places)))
        copy_us = draw(_times) if offloaded else 0.0
        reductions.append(
            Reduction(born=born, ready=ready, size_bytes=draw(_sizes), stages_us=draw(_stages), copy_us=copy_us)
        )
    saved = []
    for _ in range(draw(st.integers(0, 2))):
        need = draw(st.integers(0, count - 1))
        saved.append(Saved(need=need, free=draw(st.integers(need + 1, count)), size_bytes=draw(_sizes)))
    return Problem(
        tuple(draw(st.lists(_times, min_size=count, max_size=count))),
        tuple(sorted(gathers, key=lambda g: g.need)),
        tuple(sorted(reductions, key=lambda r: r.ready)),
        saved=tuple(saved),
        exchanges=frozenset(draw(st.lists(st.integers(0, count - 1), max_size=2))),
    )


def each_when_needed(starts: Sequence[int]) -> list[Issue]:
    """Starts of gathers in order, each with its copy right before."""
    return [Issue(what, index, at) for index, at in enumerate(starts) for what in (What.COPY, What.GATHER)]


def play(problem: Problem, issued: Sequence[Issue], waits: Sequence[Sequence[int]]) -> float:
    """Time of a plan in us, by the simulator that `explain` uses: every event spelled out.

    Where several things happen at one position, stages that are over are waited for first, as the planner does.
    """
    stages = [(i, k) for i, reduction in enumerate(problem.reductions) for k in range(len(reduction.stages_us))]
    events: list[Event] = []
    done: set[tuple[int, int]] = set()

    def wait(stage: tuple[int, int]) -> None:
        index, number = stage
        events.append(Wait(("waited", *stage), stage))
        done.add(stage)
        if (index, number + 1) in stages:
            events.append(Start((index, number + 1), "link", problem.reductions[index].stages_us[number + 1]))
        else:
            events.append(Start(("out", index), "to the host", problem.reductions[index].copy_us))

    def ends_us(stage: tuple[int, int]) -> float:
        return simulate(events).transfers[stage].end_us

    def wait_for_those_that(started_before: set[tuple[int, int]], position: int) -> None:
        todo = {s for s in started_before if s not in done and waits[s[0]][s[1]] == position}
        for stage in sorted(sorted(todo), key=ends_us):
            wait(stage)

    for position in range(len(problem.steps_us) + 1):
        now_us = simulate([*events, Compute("now", 0.0)]).reached_us["now"]
        started = {e.key for e in events if isinstance(e, Start) and e.key in stages and ends_us(e.key) <= now_us}
        wait_for_those_that(started, position)
        events += [event for start in issued if start.position == position for event in _started(problem, start)]
        events += [
            Start((i, 0), "link", r.stages_us[0]) for i, r in enumerate(problem.reductions) if r.ready == position
        ]
        while any(waits[i][k] == position and (i, k) not in done for i, k in stages):
            running = {e.key for e in events if isinstance(e, Start) and e.key in stages and e.key not in done}
            wait(min(sorted(s for s in running if waits[s[0]][s[1]] == position), key=ends_us))
        events += [Wait(("needed", i), ("g", i)) for i, g in enumerate(problem.gathers) if g.need == position]
        if position in problem.exchanges:
            sent = Start(("step", position), "link", problem.steps_us[position])
            events += [sent, Wait(("exchanged", position), sent.key)]
        elif position < len(problem.steps_us):
            events.append(Compute(("step", position), problem.steps_us[position]))
    return simulate(events).end_us


def _started(problem: Problem, start: Issue) -> list[Event]:
    index, gather = start.gather, problem.gathers[start.gather]
    if start.what is What.COPY:
        return [Start(("in", index), "from the host", gather.copy_us)]
    copied: list[Event] = [Wait(("copied", index), ("in", index))] if gather.copy_us else []
    return [*copied, Start(("g", index), "link", gather.time_us)]


def live_bytes(problem: Problem, issued: Sequence[Issue], waits: Sequence[Sequence[int]]) -> list[int]:
    """Bytes that a plan holds during each step."""
    held = [(0, saved.free, saved.size_bytes) for saved in problem.saved]
    end = len(problem.steps_us)
    for start in issued:
        g = problem.gathers[start.gather]
        if start.what is What.COPY:
            held.append((start.position, g.need, g.copy_bytes))
        else:
            free = end if g.kept else g.free
            held += [(start.position, free, g.size_bytes), (start.position, g.need, g.sent_bytes - g.copy_bytes)]
    held += [(r.born, w[0], r.size_bytes) for w, r in zip(waits, problem.reductions, strict=True)]
    return [sum(size for begin, end, size in held if begin <= step < end) for step in range(len(problem.steps_us))]
