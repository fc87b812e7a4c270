"""What is in memory while a graph runs that does not see it: frozen shards in backward, other graphs' memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile.cost.memory import Holder
from fsdp_compile.errors import BudgetTooSmallError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.ir.graph import Phase
from tests.models.round_sizes import WIDTH, Broken, InARow, Stack

ROWS = 8192


class Tower(nn.Module):
    """Its backward reads no frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).requires_grad_(requires_grad=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(x))


def _plan(make: type[nn.Module], rows: int, **options: Any) -> Plan:
    with torch.device("meta"):
        model, x = make(), torch.zeros(rows, WIDTH)
    return explain(model, x, world_size=2, options={"lower": "eager", **options})


def test_backward_runs_beside_the_shards_and_inputs_that_it_does_not_read() -> None:
    plan = _plan(Tower, ROWS)
    shards = sum(unit.shard_bytes for unit in plan.units)
    for graph in plan.graphs:
        assert set(graph.memory.live_bytes[Holder.SHARD]) == {shards}
        assert set(graph.memory.live_bytes[Holder.INPUT]) == {4 * ROWS * WIDTH}
    there = plan.at(world_size=4)
    assert max(there.backward[0].memory.live_bytes[Holder.SHARD]) == shards // 2


def test_a_budget_has_room_for_them() -> None:
    with pytest.raises(BudgetTooSmallError) as caught:
        _plan(Tower, 8, memory_budget_gb=1e-9, activations="saved")
    least = caught.value.least_bytes
    plan = _plan(Tower, 8, memory_budget_gb=least / 1e9, activations="saved")
    assert plan.backward[0].memory.peak_bytes == plan.peak_bytes
    assert plan.peak_bytes <= least
    there = plan.at(gb_per_s=1)
    assert there.peak_bytes <= least


def test_graphs_of_other_regions_are_in_memory() -> None:
    class Whole(InARow):
        def __init__(self) -> None:
            super().__init__(block for half in (Stack(2), Stack(2)) for block in half.blocks)

    whole, broken = _plan(Whole, ROWS), _plan(Broken, ROWS)
    assert len(broken.forward) == 2
    assert broken.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.15)
    shards = sum(unit.shard_bytes for unit in broken.units)
    assert all(set(graph.memory.live_bytes[Holder.SHARD]) == {shards} for graph in broken.graphs)
    saved = [graph.memory.live_bytes[Holder.SAVED] for graph in broken.forward]
    assert saved[1][0] == saved[0][-1]
    last = broken.backward[-1]
    assert (last.phase, last.region) == (Phase.BACKWARD, 0)
    ended = broken.backward[0].memory.live_bytes[Holder.SHARD_GRADIENT][-1]
    assert last.memory.live_bytes[Holder.SHARD_GRADIENT][0] == ended > 0
