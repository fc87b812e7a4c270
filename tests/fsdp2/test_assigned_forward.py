"""A forward that is assigned to a module after it was sharded gathers what it reads, as TRL's trainers assign one."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from tests import long
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess


class _Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight = self.head.weight
    # TRL does this for FSDP2: gradients of a tensor that was made so would be averaged by no rank.
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return linear(self.body(x).relu(), weight, self.head.bias)


def _assign(model: nn.Module) -> None:
    model.forward = types.MethodType(_forward, model)


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED])
@on_ranks()
def test_reads_of_an_assigned_forward_gather(how: Run) -> None:
    at_once, later = WithOneProcess(_Headed, how), WithOneProcess(_Headed, how)
    at_once.change(_assign)
    for each in (at_once, later):
        each.train(steps=1)
    later.change(_assign)
    for each in (at_once, later):
        each.train()
