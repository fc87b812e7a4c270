"""What graphs get of a budget, and which budget gives them what they need."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.planner.problem import Gather, Problem, Reduction, for_graphs, of_graphs


@given(st.integers(min_value=0, max_value=10**12))
def test_a_budget_for_graphs_is_enough_for_them_and_hardly_more(held_bytes: int) -> None:
    budget_bytes = for_graphs(held_bytes)
    assert held_bytes <= of_graphs(budget_bytes) <= held_bytes + 1
    assert budget_bytes <= held_bytes * 1.00025 + 1


@given(st.integers(min_value=4096, max_value=10**12))
def test_something_is_left_beside_the_graphs(budget_bytes: int) -> None:
    assert 1 <= budget_bytes - of_graphs(budget_bytes) <= budget_bytes / 4096


def test_a_unit_that_is_split_takes_no_room_from_the_plan() -> None:
    """Two units of 8 bytes and their gradients, whole, and the second one in four parts."""

    def problem(parts: int) -> Problem:
        size_bytes = 8 // parts
        gathers = [Gather(need=0, free=2, size_bytes=8, time_us=1.0, unit="a")]
        gathers += [Gather(need=2 + i, free=6, size_bytes=size_bytes, time_us=1.0, unit="b") for i in range(parts)]
        reductions = [Reduction(born=2 + i, ready=3 + i, size_bytes=size_bytes, stages_us=(1.0,)) for i in range(parts)]
        named = [dataclasses.replace(one, unit="b") for one in reductions]
        return Problem((1.0,) * 6, tuple(gathers), tuple(named))

    whole, split = problem(1), problem(4)
    assert whole.promised_bytes == split.promised_bytes == (8 + 8) + 8 + 8
    assert max(split.least_live_bytes()) < max(whole.least_live_bytes()), "what is needed at least is less"
