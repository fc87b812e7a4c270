"""`module.compile(backend="fsdp")`: sharded models and parts of them train, plain ones are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import ConfigError, fully_shard
from tests import long
from tests.models.kinds import WIDTH, Stack
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, compile_in_place, loss_of


class _Head(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.trunk(x))


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        trunk = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = _Head(trunk), _Head(trunk)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


PARTS: list[tuple[Callable[[], nn.Module], Callable[[Any], list[nn.Module]]]] = [
    (Stack, lambda model: [model]),
    (Stack, lambda model: [*model.blocks, model.head]),
    (_TwoHeads, lambda model: [model.a, model.b]),
]


@pytest.mark.core
@long.parametrize("case", range(len(PARTS)), always=[0])
@on_ranks()
def test_plain_ones_are_refused_before_anything_is_trained(case: int) -> None:
    make, parts = PARTS[case]
    model = make()
    expected = copy.deepcopy(model)
    for part in parts(model):
        compile_in_place(part)
    batch = torch.ones(2, WIDTH)
    with torch.no_grad():  # each rank computes with its whole copy, and nothing is trained
        torch.testing.assert_close(model(batch), expected(batch))
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            model(batch)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters()), "something was sharded"
    fully_shard(model)
    loss_of(model(batch)).backward()
    message = str(caught.value)
    assert "compiled code trains a plain model" in message
    assert "torch.compile(model, backend='fsdp') of the whole model, which shards it, or fully_shard(model)" in message


@long.parametrize("how", [Run.PLAIN, Run.EAGER], always=[Run.EAGER], ids=["whole", "sharded"])
@on_ranks()
def test_what_the_refusal_of_a_shared_trunk_advises(how: Run) -> None:
    pair = WithOneProcess(_TwoHeads, how, shape=WIDTH)
    for head in (pair.model.a, pair.model.b) if how is Run.EAGER else ():
        compile_in_place(head)
    pair.train(steps=3)
