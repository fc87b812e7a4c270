"""Blocks that share one compiled graph are each in the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.sharding.fully_shard import fully_shard
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Stack

DEPTH = 4
OPTIONS: dict[str, Any] = {"lower": "eager", "bucket_mb": 0}


class Broken(Stack):
    """A graph break in a loop: Dynamo leaves the loop to Python, which calls each block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def _plan(make: type[Stack]) -> Plan:
    with torch.device("meta"):
        model, x = make(DEPTH), torch.zeros(64, WIDTH)
    return explain(model, x, world_size=4, options=OPTIONS)


def _flops(plan: Plan) -> int:
    return sum(graph.flops for graph in plan.graphs)


def test_each_block_is_counted_with_its_names() -> None:
    whole, broken = _plan(Stack), _plan(Broken)
    assert len(broken.forward) == len(broken.backward) == DEPTH
    assert _flops(broken) == _flops(whole)
    assert broken.volume == whole.volume
    assert [c.unit for g in broken.forward for c in g.collectives] == [f"blocks.{i}" for i in range(DEPTH)]
    assert {c.unit for c in broken.backward[0].collectives} == {f"blocks.{DEPTH - 1}"}
    assert [item for item in broken.skipped if "overlap" not in item.what] == list(whole.skipped)
    there = broken.at(world_size=8)
    assert _flops(there) == _flops(whole)
    assert there.volume == whole.at(world_size=8).volume


def test_open_sizes_are_refused() -> None:
    model, x = Broken(DEPTH), torch.zeros(64, WIDTH)
    with pytest.raises(UnsupportedModelError, match="graph breaks split the model into 4 regions"):
        explain(model, x, world_size=4, options=OPTIONS, dims={"batch": 0})


def test_blocks_that_ran_the_code_of_another_one_are_named() -> None:
    with fake_world(4):
        compiled = torch.compile(fully_shard(Broken(DEPTH)), backend="fsdp", options=OPTIONS)
        compiled(torch.randn(64, WIDTH)).sum().backward()
        said = {item.what: item.why for item in explain(compiled).skipped}
    assert "is laid out alike" in said["blocks.2, blocks.3: not in the numbers"]
