"""A sharded model that the forward of another one calls without owning it: a list hides it from `parameters()`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard, step_in_backward
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly

Change = Callable[[nn.Linear], object]


class _Student(nn.Module):
    def __init__(self, teacher: nn.Linear) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.others = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](torch.tanh(self.first(x)))


def _models() -> tuple[_Student, _Student]:
    torch.manual_seed(0)
    student = _Student(nn.Linear(6, 6))
    plain = copy.deepcopy(student)
    fully_shard(student.others[0])
    fully_shard(student)
    return student, plain


def _sgd(student: _Student) -> torch.optim.SGD:
    return torch.optim.SGD([*student.first.parameters(), *student.others[0].parameters()], lr=0.5)


def _train(student: _Student, call: Any, plain: _Student) -> None:
    for model, called in ((student, call), (plain, plain)):
        optimizer = _sgd(model)
        for seed in range(4):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
            called(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(student.others[0].parameters(), plain.others[0].parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor(), theirs.data)


@on_ranks()
def test_both_are_trained() -> None:
    student, plain = _models()
    _train(student, compile_eagerly(student), plain)
    student, plain = _models()
    step_in_backward(_sgd(student))
    _train(student, compile_eagerly(student), plain)
