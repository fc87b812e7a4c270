"""The plan of a model that is compiled block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_compile import ConfigError
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from tests.models.round_sizes import WIDTH, Stack

DEPTH = 4


def _plan(**options: Any) -> Plan:
    with torch.device("meta"):
        model, x = Stack(DEPTH), torch.zeros(64, WIDTH)
    return explain(model, x, world_size=4, options={"lower": "eager", **options})


def _ahead(plan: Plan, graph: int) -> list[int]:
    """How many gathers start before the first use of each unit, of those behind it."""
    sent = [each for each in plan.graphs[graph].collectives if each.kind is Kind.GATHER]
    waits = [each.wait.index for each in sent if each.wait is not None]
    return [sum(later.start.index < wait for later in sent[k + 1 :]) for k, wait in enumerate(waits)]


def test_each_unit_gathers_one_ahead_and_is_reduced_one_behind() -> None:
    blocks, apart = _plan(regions="blocks"), _plan(regions="whole", prefetch=0)
    assert blocks.volume == apart.volume
    assert blocks.step_us < apart.step_us
    assert blocks.peak_bytes > apart.peak_bytes
    assert _ahead(blocks, 0) == [1] * (DEPTH - 1) + [0]
    assert _ahead(apart, 0) == [0] * DEPTH


def test_a_distance_holds_for_blocks_too() -> None:
    assert _ahead(_plan(regions="blocks", prefetch=2), 0) == [2, 2, 1, 0]


def test_a_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="blocks are compiled one by one"):
        _plan(regions="blocks", memory_budget_gb=1.0)
