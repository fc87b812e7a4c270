"""What measured runs say of the link, beside another simulator; and what a new plan saves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compile.cost.timeline import Compute, Event, Start, Wait, simulate
from fsdp_compile.planner.list_schedule import place
from fsdp_compile.planner.measured_times import (
    STEPS_PER_DOUBLING,
    Call,
    Mark,
    PlannedTimes,
    Run,
    Transfer,
    gain,
    link_steps,
    times_of,
)
from fsdp_compile.planner.problem import Gather, Problem

LINK = "fsdp.shard.0"


def planned(problem: Problem, times_us: list[float], calls: list[Call], *, budget_bytes: int = 0) -> PlannedTimes:
    placement = place(problem, budget_bytes=budget_bytes)
    transfers = tuple(Transfer(LINK, LINK, us) for us in times_us)
    return PlannedTimes(1, problem.compute_us, transfers, tuple(calls), problem, placement, budget_bytes)


def run(times_us: list[float], calls: list[Call], gaps_us: list[float]) -> Run:
    """A run in which computing goes on for a while before each call, and after the last one."""
    events: list[Event] = []
    for number, (call, gap_us) in enumerate(zip(calls, gaps_us, strict=False)):
        events.append(Compute(("gap", number), gap_us))
        assert call.transfer is not None
        key = call.transfer
        events.append(Wait(("wait", number), key) if call.waits else Start(key, "link", times_us[key]))
    timeline = simulate([*events, Compute("rest", gaps_us[-1])])
    marks = []
    for number, call in enumerate(calls):
        begin_us = timeline.reached_us["wait", number] if call.waits else timeline.reached_us[call.transfer]
        end_us = max(begin_us, timeline.transfers[call.transfer].end_us) if call.waits else begin_us
        marks.append(Mark(call.waits, begin_us, end_us))
    return Run(Mark(waits=False, begin_us=0.0, end_us=timeline.end_us), tuple(marks))


@st.composite
def orders(draw: Any) -> tuple[list[float], list[Call], list[float]]:
    """Estimated times of collectives, an order of their starts and waits, and time between these."""
    times_us = draw(st.lists(st.integers(200, 2000).map(float), min_size=1, max_size=8))
    calls: list[Call] = []
    running: list[int] = []
    for number in range(len(times_us)):
        calls.append(Call(waits=False, transfer=number))
        running.append(number)
        while running and draw(st.booleans()):
            calls.append(Call(waits=True, transfer=running.pop(draw(st.integers(0, len(running) - 1)))))
    calls += [Call(waits=True, transfer=number) for number in running]
    return times_us, calls, draw(st.lists(st.integers(0, 900).map(float), min_size=len(calls) + 1, max_size=20))


@given(orders(), st.integers(-8, 8), st.sampled_from((0.5, 1.0, 3.0)))
@settings(max_examples=100, deadline=None)
def test_a_link_that_holds_a_run_up_is_known(
    order: tuple[list[float], list[Call], list[float]], step: int, slower: float
) -> None:
    """However slow computing is, beside which the link is as many times slower as estimated."""
    times_us, calls, gaps_us = order
    gaps_us = gaps_us[: len(calls) + 1] if len(gaps_us) > len(calls) else [*gaps_us, 10.0]
    compute_us = sum(gaps_us)
    problem = Problem((compute_us,), (), ())
    factor = slower * 2 ** (step / STEPS_PER_DOUBLING)
    measured = run([factor * us for us in times_us], calls, [slower * us for us in gaps_us])
    found = link_steps([(planned(problem, times_us, calls), measured)]) if compute_us else {}
    stalls = [mark for mark in measured.marks if mark.waits and mark.end_us - mark.begin_us > 250]
    if found and stalls:
        assert found == {LINK: step}
    elif found:  # hidden: never said to be faster than it is, or slower than estimated beside what computing takes
        assert min(0, step) <= found[LINK] <= max(4 if slower < 1 else 0, step)


def test_what_is_hidden_keeps_its_estimate_unless_it_was_over_earlier() -> None:
    calls = [Call(waits=False, transfer=0), Call(waits=True, transfer=0)]
    expected = planned(Problem((1000.0,), (), ()), [500.0], calls)
    assert link_steps([(expected, run([400.0], calls, [100.0, 800.0, 100.0]))]) == {LINK: 0}
    fast = run([50.0], calls, [400.0, 125.0, 475.0])
    assert link_steps([(expected, fast)]) == {LINK: -2 * STEPS_PER_DOUBLING}, "over within 125 us, a quarter"


def test_a_run_with_other_calls_is_not_that_of_a_plan() -> None:
    calls = [Call(waits=False, transfer=0), Call(waits=True, transfer=0)]
    expected = planned(Problem((1000.0,), (), ()), [500.0], calls)
    assert run([1.0], calls, [1.0] * 3).is_of(expected)
    assert not dataclasses.replace(run([1.0], calls, [1.0] * 3), marks=()).is_of(expected)


def layers(link_us: float, *, room: int = 3) -> Problem:
    gathers = (Gather(need=2 * i, free=2 * i + 2, size_bytes=1, time_us=link_us) for i in range(12))
    return Problem((100.0,) * 24, tuple(gathers), (), (room - 1,) * 24)


@pytest.mark.parametrize(("estimated", "worth"), [(1.0, False), (1 / 1.9, True), (1 / 16, True)])
def test_a_plan_for_a_faster_link_is_worth_another_one(estimated: float, *, worth: bool) -> None:
    expected = planned(layers(estimated * 190.0), [1.0], [], budget_bytes=8)
    ran = Run(Mark(waits=False, begin_us=0.0, end_us=expected.compute_us), ())
    assert (gain([(expected, ran)], {LINK: 1 / estimated}, margin=1.5) > 0.03) is worth


@pytest.mark.parametrize(("times", "idle"), [(1.9, 0.0), (2.0, 0.5), (0.5, 0.5), (4.0, 0.0)])
def test_where_the_ratio_is_far_off_all_that_no_lane_needed_counts(times: float, idle: float) -> None:
    """Half of a run was neither of computing nor of the link, and if the link is that slow, nothing."""
    expected = planned(Problem((500.0,), (), ()), [250.0], [])
    ran = Run(Mark(waits=False, begin_us=0.0, end_us=1000.0), (Mark(waits=True, begin_us=100.0, end_us=600.0),))
    assert gain([(expected, ran)], {LINK: times}, margin=1.5) == idle


def test_ratios_are_written_with_three_digits() -> None:
    assert [times_of(step) for step in (-8, -1, 0, 1, 2, 40)] == [0.25, 0.841, 1.0, 1.19, 1.41, 1020.0]
