"""A budget of memory is for a whole model: none of several graphs knows what the others hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fsdp_compile import explain, fully_shard
from fsdp_compile.errors import ConfigError
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Broken, Stack, on_meta

BUDGET: dict[str, Any] = {"lower": "eager", "memory_budget_gb": 1.0}


def test_a_plan_of_several_graphs_has_no_budget() -> None:
    model, x = on_meta(Broken)
    with pytest.raises(ConfigError, match=r"does not read .*second.* part of its model"):
        explain(model, x, world_size=4, options=BUDGET)


def test_a_compile_of_a_part_has_no_budget() -> None:
    x = torch.randn(4, WIDTH)
    with fake_world(4):
        compiled = torch.compile(Broken(), backend="fsdp", options=BUDGET)
        with pytest.raises(BackendCompilerFailed, match="part of its model") as caught:
            compiled(x)
        assert isinstance(caught.value.inner_exception, ConfigError)
        parts = Stack(2)
        for block in parts.blocks:
            fully_shard(block)
        called_alone = torch.compile(fully_shard(parts).blocks[0], backend="fsdp", options=BUDGET)
        with pytest.raises(BackendCompilerFailed, match=r"does not read blocks\.1"):
            called_alone(x)


def test_a_model_whose_outermost_unit_has_no_parameters_is_whole() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with fake_world(4):
        for layer in model:
            fully_shard(layer)
        compiled = torch.compile(fully_shard(model), backend="fsdp", options=BUDGET)
        compiled(torch.randn(4, WIDTH)).sum().backward()
