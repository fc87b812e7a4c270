"""Hand-made schedules whose times are counted on fingers."""

from __future__ import annotations

import itertools

import pytest

from fsdp_compile.cost.timeline import Compute, Event, Start, Wait, simulate


def test_a_gather_that_fits_behind_compute_is_hidden() -> None:
    timeline = simulate([Start("g", "link", 5.0), Compute("a", 8.0), Wait("w", "g"), Compute("b", 2.0)])
    transfer = timeline.transfers["g"]
    assert (transfer.begin_us, transfer.end_us, transfer.waited_us) == (0.0, 5.0, 8.0)
    assert transfer.exposed_us == 0.0
    assert transfer.computed_us == 8.0
    assert timeline.end_us == 10.0


def test_what_compute_does_not_cover_is_exposed() -> None:
    timeline = simulate([Compute("a", 1.0), Start("g", "link", 5.0), Compute("b", 2.0), Wait("w", "g")])
    assert timeline.transfers["g"].exposed_us == 3.0
    assert timeline.exposed_us == 3.0
    assert timeline.compute_us == 3.0
    assert timeline.end_us == 6.0


def test_collectives_of_one_lane_queue_and_those_of_two_do_not() -> None:
    def ends(second_lane: str) -> tuple[float, float]:
        events: list[Event] = [Start("a", "one", 4.0), Start("b", second_lane, 3.0), Wait("wb", "b"), Wait("wa", "a")]
        timeline = simulate(events)
        return timeline.transfers["b"].queued_us, timeline.end_us

    assert ends("one") == (4.0, 7.0)
    assert ends("two") == (0.0, 4.0)


def test_lanes_of_one_link_share_it_while_both_send() -> None:
    events: list[Event] = [Start("a", "one", 4.0, "link"), Compute("c", 2.0), Start("b", "two", 3.0, "link")]
    timeline = simulate([*events, Wait("wa", "a"), Wait("wb", "b")])
    a, b = timeline.transfers["a"], timeline.transfers["b"]
    # From 2 on each has half of the link: 2 are left of a, and 1 of b is left once they are sent.
    assert (a.begin_us, a.end_us, a.exposed_us) == (0.0, 6.0, 4.0)
    assert (b.begin_us, b.end_us, b.queued_us, b.exposed_us) == (2.0, 7.0, 0.0, 1.0)
    assert timeline.busy_us == {"link": 7.0}
    assert timeline.end_us == 7.0


def test_a_link_is_never_idle_while_a_lane_has_something_to_send() -> None:
    works = {"one": [3.0, 1.0, 2.5], "two": [0.5, 4.0]}
    events: list[Event] = [
        Start((lane, index), lane, time_us, "link")
        for lane, times in works.items()
        for index, time_us in enumerate(times)
    ]
    timeline = simulate(events)
    assert timeline.end_us == pytest.approx(sum(sum(times) for times in works.values()))
    for lane, times in works.items():
        spans = [timeline.transfers[lane, index] for index in range(len(times))]
        assert all(before.end_us == after.begin_us for before, after in itertools.pairwise(spans))


def test_a_second_wait_for_the_same_collective_costs_nothing() -> None:
    timeline = simulate([Start("g", "link", 5.0), Wait("w1", "g"), Compute("a", 1.0), Wait("w2", "g")])
    transfer = timeline.transfers["g"]
    assert transfer.exposed_us == 5.0
    assert transfer.waited_us == 0.0
    assert timeline.reached_us["w2"] == 6.0


def test_a_step_is_compute_plus_exposed_when_everything_is_waited_for() -> None:
    events: list[Event] = []
    for layer in range(5):
        events += [Start(("g", layer), "link", 3.0), Compute(("c", layer), 2.0), Wait(("w", layer), ("g", layer))]
    timeline = simulate(events)
    assert timeline.end_us == pytest.approx(timeline.compute_us + timeline.exposed_us)
    assert timeline.busy_us == {"link": 15.0}


def test_a_collective_that_nobody_waits_for_still_ends_the_schedule() -> None:
    timeline = simulate([Start("r", "link", 9.0), Compute("a", 1.0)])
    assert timeline.transfers["r"].waited_us is None
    assert timeline.end_us == 9.0
