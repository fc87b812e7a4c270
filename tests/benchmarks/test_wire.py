"""When transfers end on a link that is a queue, or several that share its bandwidth; against arithmetic by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.network.wire import Link, Wire


def test_a_transfer_costs_latency_and_bytes() -> None:
    wire = Wire(Link(bytes_per_s=100.0, latency_s=0.5))
    assert wire.end_s(wire.submit("a", 200.0, now_s=1.0)) == pytest.approx(1.0 + 0.5 + 2.0)


def test_a_lane_is_a_queue() -> None:
    wire = Wire(Link(bytes_per_s=100.0, latency_s=0.5))
    first = wire.submit("a", 200.0, now_s=0.0)
    second = wire.submit("a", 100.0, now_s=1.0)
    late = wire.submit("a", 100.0, now_s=10.0)
    assert [wire.end_s(t) for t in (first, second, late)] == pytest.approx([2.5, 4.0, 11.5])


def test_two_lanes_share_the_bandwidth_while_both_send() -> None:
    wire = Wire(Link(bytes_per_s=100.0))
    long = wire.submit("a", 200.0, now_s=0.0)
    short = wire.submit("b", 50.0, now_s=0.0)
    # Half the rate each until `short` ends at 1 s; then 150 bytes of `long` are left at the full rate.
    assert wire.end_s(short) == pytest.approx(1.0)
    assert wire.end_s(long) == pytest.approx(2.5)


def test_latency_of_one_lane_leaves_the_bandwidth_to_the_other() -> None:
    wire = Wire(Link(bytes_per_s=100.0, latency_s=1.0))
    first = wire.submit("a", 100.0, now_s=0.0)
    second = wire.submit("b", 100.0, now_s=1.0)  # starts to send when `first` has ended
    assert wire.end_s(first) == pytest.approx(2.0)
    assert wire.end_s(second) == pytest.approx(3.0)


def test_a_later_transfer_on_another_lane_delays_an_earlier_one() -> None:
    wire = Wire(Link(bytes_per_s=100.0))
    first = wire.submit("a", 100.0, now_s=0.0)
    assert wire.end_s(first) == pytest.approx(1.0)
    wire.submit("b", 100.0, now_s=0.5)
    assert wire.end_s(first) == pytest.approx(1.5)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1000), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_lanes_never_send_more_than_the_bandwidth(transfers: list[tuple[str, int, int]]) -> None:
    wire = Wire(Link(bytes_per_s=100.0))
    now_s = 0.0
    made = []
    for lane, size_bytes, pause_s in transfers:
        now_s += pause_s
        made.append((lane, wire.submit(lane, float(size_bytes), now_s)))
    ends = [wire.end_s(transfer) for _, transfer in made]
    # Work is conserved: with everything there from some point on, the last ends when all bytes have passed.
    assert max(ends) >= sum(size for _, size, _ in transfers) / 100.0 - 1e-9
    for lane in "abc":
        of_lane = [end for (name, _), end in zip(made, ends, strict=True) if name == lane]
        assert of_lane == sorted(of_lane)


def test_a_network_without_bandwidth_limit_costs_latency_only() -> None:
    wire = Wire(Link(bytes_per_s=math.inf, latency_s=0.25))
    assert wire.end_s(wire.submit("a", 1e12, now_s=0.0)) == pytest.approx(0.25)


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0), (math.nan, 0.0)])
def test_impossible_links_are_refused(bytes_per_s: float, latency_s: float) -> None:
    with pytest.raises(ValueError, match="bandwidth above 0"):
        Link(bytes_per_s, latency_s)
