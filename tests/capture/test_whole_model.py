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


class BrokenLoop(Stack):
    """Python calls its blocks one by one, which share compiled code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("make", [Broken, BrokenLoop])
def test_several_graphs_have_no_budget(make: type[nn.Module]) -> None:
    model, x = on_meta(make)
    with pytest.raises(ConfigError, match=r"does not read .*part of its model"):
        explain(model, x, world_size=4, options=BUDGET)
    with fake_world(4), pytest.raises(BackendCompilerFailed, match=r"does not read .*part of its model") as caught:
        torch.compile(make(), backend="fsdp", options=BUDGET)(torch.randn(4, WIDTH))
    assert isinstance(caught.value.inner_exception, ConfigError)


def test_a_block_has_no_budget() -> None:
    with fake_world(4):
        parts = Stack(2)
        for block in parts.blocks:
            block.compile(backend="fsdp", options=BUDGET)
        with pytest.raises(BackendCompilerFailed, match=r"does not read blocks\.1"):
            fully_shard(parts)(torch.randn(4, WIDTH))


class WithHeads(Stack):
    """A head that is used in training alone, and one that is never used."""

    def __init__(self) -> None:
        super().__init__(2)
        self.auxiliary = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return self.auxiliary(x) if self.training else x


def test_what_a_forward_does_not_use_is_no_other_part() -> None:
    x = torch.randn(4, WIDTH)
    with fake_world(4):
        model = WithHeads()
        compiled = torch.compile(model, backend="fsdp", options=BUDGET)
        compiled(x).sum().backward()
        model.eval()
        compiled(x).sum().backward()
        del model.blocks[1:], model.auxiliary, model.unused
        compiled(x).sum().backward()
        assert explain(WithHeads(), x, world_size=4, options=BUDGET).step_us > 0


def test_a_model_whose_outermost_unit_has_no_parameters_is_whole() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with fake_world(4):
        for layer in model:
            fully_shard(layer)
        compiled = torch.compile(fully_shard(model), backend="fsdp", options=BUDGET)
        compiled(torch.randn(4, WIDTH)).sum().backward()
