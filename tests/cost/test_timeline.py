"""Hand-made schedules whose times are counted on fingers."""

from __future__ import annotations

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
