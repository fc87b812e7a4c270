"""What graphs get of a budget, and which budget gives them what they need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp_compile.planner.problem import for_graphs, of_graphs


@given(st.integers(min_value=0, max_value=10**12))
def test_a_budget_for_graphs_is_enough_for_them_and_hardly_more(held_bytes: int) -> None:
    budget_bytes = for_graphs(held_bytes)
    assert held_bytes <= of_graphs(budget_bytes) <= held_bytes + 1
    assert budget_bytes <= held_bytes * 1.00025 + 1


@given(st.integers(min_value=4096, max_value=10**12))
def test_something_is_left_beside_the_graphs(budget_bytes: int) -> None:
    assert 1 <= budget_bytes - of_graphs(budget_bytes) <= budget_bytes / 4096
