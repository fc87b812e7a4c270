"""A sharded model that the forward of another one calls without owning it: a list hides it from `parameters()`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, RankMismatchError, fully_shard, step_in_backward
from tests.ranks import run_ranks

Change = Callable[[nn.Linear], object]


class _Student(nn.Module):
    def __init__(self, teacher: nn.Linear) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.others = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](torch.tanh(self.first(x)))


def _thaw(teacher: nn.Linear) -> None:
    teacher.requires_grad_(requires_grad=True)


def _freeze(teacher: nn.Linear) -> None:
    teacher.requires_grad_(requires_grad=False)


def _replace(teacher: nn.Linear) -> None:
    teacher.weight = nn.Parameter(torch.full((6, 6), 0.1))


def _models(before: Change | None = None) -> tuple[_Student, _Student]:
    torch.manual_seed(0)
    student = _Student(nn.Linear(6, 6))
    if before is not None:
        before(student.others[0])
    plain = copy.deepcopy(student)
    fully_shard(student.others[0])
    fully_shard(student)
    return student, plain


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="fsdp", options={"lower": "eager"})


def _sgd(student: _Student) -> torch.optim.SGD:
    return torch.optim.SGD([*student.first.parameters(), *student.others[0].parameters()], lr=0.5)


def _step(call: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    call(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _compare(student: _Student, plain: _Student) -> None:
    for mine, theirs in zip(student.others[0].parameters(), plain.others[0].parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor(), theirs.data)


def _train(student: _Student, call: Any, plain: _Student, change: Change | None = None) -> None:
    for model, called in ((student, call), (plain, plain)):
        optimizer = _sgd(model)
        for seed in range(4):
            _step(called, optimizer, seed)
            if seed == 1 and change is not None:
                change(model.others[0])
                optimizer = _sgd(model)
    _compare(student, plain)


def _uncompiled() -> None:
    for before, change in ((_freeze, _thaw), (None, _freeze), (None, _replace)):
        student, plain = _models(before)
        _train(student, student, plain, change)
    student, plain = _models()
    step_in_backward(_sgd(student))
    _train(student, student, plain)


def _compiled_whole() -> None:
    student, plain = _models()
    _train(student, _compiled(student), plain, _replace)
    for before, change in ((_freeze, _thaw), (None, _freeze)):
        student, plain = _models(before)
        with pytest.raises(ConfigError, match="requires_grad, and the compiled function cannot notice"):
            _train(student, _compiled(student), plain, change)
    student, plain = _models()
    step_in_backward(_sgd(student))
    _train(student, _compiled(student), plain)


def _kept() -> None:
    student, plain = _models()
    sharded: Any = student.others[0]
    sharded.set_reshard_after_backward(False)
    for model, call in ((student, _compiled), (plain, nn.Sequential)):
        call_student, call_teacher = call(model), call(model.others[0])
        optimizer = _sgd(model)
        for seed in range(3):
            _step(call_teacher, optimizer, seed)
            _step(call_student, optimizer, seed + 3)
    _compare(student, plain)


def _copies_that_differ() -> None:
    torch.manual_seed(dist.get_rank())
    teacher = nn.Linear(6, 6)
    torch.manual_seed(0)
    student = _Student(teacher)
    fully_shard(teacher)
    fully_shard(student)
    with pytest.raises(RankMismatchError, match="different values of a parameter"):
        student(torch.ones(2, 6))


def _compiled_container(*, differs: bool = False) -> tuple[_Student, _Student]:
    """A student whose teacher is the compiled form of one of torch's containers, which Dynamo compiles whole."""
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank() if differs else 0)
    teacher = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(requires_grad=False)
    copied: Any = copy.deepcopy(teacher)
    torch.manual_seed(0)
    student = _Student(_compiled(teacher))
    plain = _Student(copied)
    plain.first.load_state_dict(student.first.state_dict())
    fully_shard(student)
    return student, plain


def _containers() -> None:
    student, plain = _compiled_container()
    for model in (student, plain):
        model(torch.ones(2, 6)).sum().backward()
        _thaw(model.others[0])
        model(torch.ones(2, 6)).sum().backward()
    for mine, theirs in zip(student.others[0].parameters(), plain.others[0].parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    student, _ = _compiled_container(differs=True)
    with pytest.raises(RankMismatchError, match="different values of a parameter"):
        student(torch.ones(2, 6))


def _another_instance() -> None:
    """Calls a compiled function with another teacher than it was compiled for."""
    torch._dynamo.reset()

    def function(teacher: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return teacher(x)

    call = torch.compile(function, backend="fsdp", options={"lower": "eager"})
    for differs in (False, True):
        torch.manual_seed(dist.get_rank() if differs else 0)
        teacher = fully_shard(nn.Linear(6, 6))
        if differs:
            with pytest.raises(RankMismatchError, match="different values of a parameter"):
                call(teacher, torch.ones(2, 6))
        else:
            call(teacher, torch.ones(2, 6))


def _all() -> None:
    _uncompiled()
    _compiled_whole()
    _kept()
    _copies_that_differ()
    _containers()
    _another_instance()


def test_a_model_that_another_one_calls_is_checked_as_if_it_was_called_alone() -> None:
    run_ranks(_all)
