"""The plan of a model that is compiled block by block, and of blocks that share one compiled graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_compile import ConfigError
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.sharding.fully_shard import fully_shard
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Stack, explained

DEPTH = 4


class Four(Stack):
    def __init__(self) -> None:
        super().__init__(DEPTH)


class Broken(Four):
    """A graph break in a loop: Dynamo leaves the loop to Python, which calls each block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def _ahead(plan: Plan) -> list[int]:
    """How many gathers of forward start before the first use of each unit, of those behind it."""
    sent = [each for each in plan.graphs[0].collectives if each.kind is Kind.GATHER]
    waits = [each.wait.index for each in sent if each.wait is not None]
    return [sum(later.start.index < wait for later in sent[k + 1 :]) for k, wait in enumerate(waits)]


def test_each_unit_gathers_one_ahead_and_is_reduced_one_behind() -> None:
    blocks, apart = explained(Four, regions="blocks"), explained(Four, regions="whole", prefetch=0)
    assert blocks.volume == apart.volume
    assert blocks.step_us < apart.step_us
    assert blocks.peak_bytes > apart.peak_bytes
    assert _ahead(blocks) == [1] * (DEPTH - 1) + [0]
    assert _ahead(apart) == [0] * DEPTH
    assert _ahead(explained(Four, regions="blocks", prefetch=2)) == [2, 2, 1, 0]
    with pytest.raises(ConfigError, match="blocks are compiled one by one"):
        explained(Four, regions="blocks", memory_budget_gb=1.0)


def _flops(plan: Plan) -> int:
    return sum(graph.flops for graph in plan.graphs)


def test_each_block_that_shares_a_graph_is_counted_with_its_names() -> None:
    whole, broken = (explained(make, bucket_mb=0) for make in (Four, Broken))
    assert len(broken.forward) == len(broken.backward) == DEPTH
    assert _flops(broken) == _flops(whole)
    assert broken.volume == whole.volume
    assert [c.unit for g in broken.forward for c in g.collectives] == [f"blocks.{i}" for i in range(DEPTH)]
    assert {c.unit for c in broken.backward[0].collectives} == {f"blocks.{DEPTH - 1}"}
    assert [item for item in broken.skipped if "overlap" not in item.what] == list(whole.skipped)
    there = broken.at(world_size=8)
    assert _flops(there) == _flops(whole)
    assert there.volume == whole.at(world_size=8).volume


def test_blocks_that_ran_the_code_of_another_one_are_named() -> None:
    options: dict[str, Any] = {"lower": "eager", "bucket_mb": 0}
    with fake_world(4):
        compiled = torch.compile(fully_shard(Broken()), backend="fsdp", options=options)
        compiled(torch.randn(64, WIDTH)).sum().backward()
        said = {item.what: item.why for item in explain(compiled).skipped}
    assert "is laid out alike" in said["blocks.2, blocks.3: not in the numbers"]
