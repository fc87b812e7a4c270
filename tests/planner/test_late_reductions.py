"""A budget is kept where reductions are waited for late and what they make is freed again, by updates or by copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import BudgetTooSmallError, explain, step_in_backward
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.explain.plan import Plan

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


def test_parts_are_copied_into_flat_gradients_beside_what_is_gathered() -> None:
    assert _peaks_over_budget(lambda: nn.Sequential(*(_Two() for _ in range(6))), 4, 256, 2) == []


def test_a_sum_over_replicas_reads_the_reduced_gradient_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    assert _peaks_over_budget(_SmallBehindLarge, 65536, 64, 4, **hybrid) == []
