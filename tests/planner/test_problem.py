"""What is planned: room in a budget, units that are kept, reductions that end late."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import BudgetTooSmallError, explain, step_in_backward
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.explain.plan import Plan
from fsdp_compile.partition.auto_reshard import Halves, Pair, choose
from fsdp_compile.planner.list_schedule import place
from fsdp_compile.planner.problem import Gather, Problem, Reduction, Saved, for_graphs, of_graphs


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
    assert choose(step, pairs(6), budget_bytes=None, margin=MARGIN) == (Pair(5, 0), Pair(4, 1))


def test_nothing_is_kept_that_spares_no_time() -> None:
    step = layers(6, compute_us=10.0, link_us=0.0)
    assert choose(step, pairs(6), budget_bytes=None, margin=MARGIN) == ()


@pytest.mark.parametrize(("budget_bytes", "kept"), [(119, 0), (120, 1), (130, 2), (140, 3), (160, 5), (170, 6)])
def test_of_a_budget_what_is_left_is_kept_and_one_bucket_of_each_kind_stays_free(budget_bytes: int, kept: int) -> None:
    """Each graph holds 100 bytes without anything early or kept; backward has a gather and a reduction to hide."""
    step = layers(6, compute_us=10.0, link_us=1000.0, least=(100, 100))
    chosen = choose(step, pairs(6), budget_bytes=budget_bytes, margin=MARGIN)
    assert len(chosen) == kept
    assert set(chosen) == set(sorted(pairs(6), key=lambda pair: -pair.forward)[:kept])


@given(st.integers(1, 6), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_what_is_kept_keeps_what_was_promised(count: int, compute_us: int, link_us: int) -> None:
    step = layers(count, compute_us=float(compute_us), link_us=float(link_us))
    kept = step.keeping(choose(step, pairs(count), budget_bytes=None, margin=MARGIN))
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


SHARES = (1.0, 1.2, 1.5)


class _Two(nn.Module):
    """The parts of its weights' gradients are copied into one flat gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class _SmallBehindLarge(nn.Module):
    """Backward reduces a large weight, then needs most memory for the activations of a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(64, 64, bias=False), nn.Linear(64, 32768, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.small(x)
        for _ in range(3):
            h = torch.tanh(h) * torch.sigmoid(h)
        return self.large(h.mean(0, keepdim=True))


def _peaks_over_budget(
    make: Callable[[], nn.Module], rows: int, width: int, world_size: int, **more: Any
) -> list[tuple[int, int]]:
    """Peaks that are above their budget, and those budgets."""

    def planned(budget_bytes: float) -> Plan:
        torch.compiler.reset()
        options = {"lower": "eager", "bucket_mb": 0, "activations": "saved", "memory_budget_gb": budget_bytes / 1e9}
        x = torch.empty(rows, width, device="meta")
        slow = hardware("cpu", 0.01)  # so that plans use what they are given
        return explain(make().to("meta"), x, world_size=world_size, options={**options, **more}, hardware=slow)

    with pytest.raises(BudgetTooSmallError) as caught:
        planned(1e3)
    budgets = [round(caught.value.least_bytes * share) for share in SHARES]
    found = [(planned(budget).peak_bytes, budget) for budget in budgets]
    return [(peak, budget) for peak, budget in found if peak > budget]


def test_results_live_until_their_update() -> None:
    def updated() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6))).to("meta")
        step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
        return model

    assert _peaks_over_budget(updated, 4, 512, 2) == []


@pytest.mark.long
def test_parts_are_copied_into_flat_gradients_beside_what_is_gathered() -> None:
    assert _peaks_over_budget(lambda: nn.Sequential(*(_Two() for _ in range(6))), 4, 256, 2) == []


def test_a_sum_over_replicas_reads_the_reduced_gradient_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    assert _peaks_over_budget(_SmallBehindLarge, 65536, 64, 4, **hybrid) == []
