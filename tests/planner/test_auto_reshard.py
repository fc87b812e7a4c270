"""`keep`: what stays gathered from forward to backward fits, and spares time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_compile.planner.auto_reshard import Halves, Pair, keep
from fsdp_compile.planner.list_schedule import place
from fsdp_compile.planner.problem import Gather, Problem, Reduction, Saved

MARGIN = 4.0


def layers(count: int, *, compute_us: float, link_us: float, least: tuple[int, int] | None = None) -> Halves:
    """A stack of equal layers of 10 bytes; backward computes twice as long and reduces each."""

    def gathers() -> tuple[Gather, ...]:
        return tuple(Gather(need=i, free=i + 1, size_bytes=10, time_us=link_us) for i in range(count))

    reductions = tuple(Reduction(born=i, ready=i + 1, size_bytes=10, stages_us=(link_us,)) for i in range(count))
    first, second = ((bytes_,) * count for bytes_ in least) if least else ((), ())
    return Halves(
        Problem((compute_us,) * count, gathers(), (), first),
        Problem((2 * compute_us,) * count, gathers(), reductions, second),
    )


def pairs(count: int) -> tuple[Pair, ...]:
    """Backward gathers in the opposite order."""
    return tuple(Pair(i, count - 1 - i) for i in range(count))


def test_without_a_budget_two_units_are_kept_where_the_link_is_the_bottleneck() -> None:
    step = layers(6, compute_us=10.0, link_us=30.0)
    assert keep(step, pairs(6), budget_bytes=None, margin=MARGIN) == (Pair(5, 0), Pair(4, 1))


def test_nothing_is_kept_that_spares_no_time() -> None:
    step = layers(6, compute_us=10.0, link_us=0.0)
    assert keep(step, pairs(6), budget_bytes=None, margin=MARGIN) == ()


@pytest.mark.parametrize(("budget_bytes", "kept"), [(119, 0), (120, 1), (130, 2), (140, 3), (160, 5), (170, 6)])
def test_of_a_budget_what_is_left_is_kept_and_one_bucket_of_each_kind_stays_free(budget_bytes: int, kept: int) -> None:
    """Each graph holds 100 bytes without anything early or kept; backward has a gather and a reduction to hide."""
    step = layers(6, compute_us=10.0, link_us=1000.0, least=(100, 100))
    chosen = keep(step, pairs(6), budget_bytes=budget_bytes, margin=MARGIN)
    assert len(chosen) == kept
    assert set(chosen) == set(sorted(pairs(6), key=lambda pair: -pair.forward)[:kept])


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_keeps_what_was_promised(count: int, compute_us: int, link_us: int) -> None:
    step = layers(count, compute_us=float(compute_us), link_us=float(link_us))
    kept = step.keeping(keep(step, pairs(count), budget_bytes=None, margin=MARGIN))
    for before, after in ((step.forward, kept.forward), (step.backward, kept.backward)):
        assert max(after.least_live_bytes()) <= before.promised_bytes == after.promised_bytes
        plan = place(after, budget_bytes=before.promised_bytes, margin=MARGIN)
        assert plan.end_us <= place(before, budget_bytes=before.promised_bytes, margin=MARGIN).end_us * 1.01


def test_keeping_moves_a_gather_from_backward_to_what_was_saved() -> None:
    kept = layers(3, compute_us=1.0, link_us=1.0, least=(5, 7)).keeping([Pair(2, 0)])
    assert [gather.kept for gather in kept.forward.gathers] == [False, False, True]
    assert [gather.need for gather in kept.backward.gathers] == [1, 2]
    assert kept.backward.saved == (Saved(need=0, free=1, size_bytes=10),)
    assert kept.forward.least_bytes == (5, 5, 5), "it is in use until the end"
    assert kept.backward.least_bytes == (7, 7, 7), "it is in use from the beginning"
    assert layers(3, compute_us=1.0, link_us=1.0, least=(5, 7)).keeping([Pair(1, 1)]).forward.least_bytes == (5, 5, 15)
