"""Graphs whose inputs or reads are unusual train as in one process, compiled as they are and sharded before."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common

from tests import long
from tests.capture.accumulation import check_accumulation
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess, close, compile_eagerly

WIDTH = 6


class _Weight(nn.Module):
    """A layer after something that is made of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x @ self.made())

    def made(self) -> torch.Tensor:
        raise NotImplementedError


class _Tangent(_Weight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = torch.func.jvp(lambda y: torch.tanh(y @ self.weight), (x,), (torch.ones_like(x),))
        return self.out(results[0]) + results[1]


class _Experts(nn.Module):
    """The number of rows of each expert depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(scores.argmax(-1) == number).squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number : number + 1])
        return out


MODELS: list[Callable[[], nn.Module]] = [_Tangent, _Experts]
"""Others are rows of tests/fuzz/catalogue.py."""


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED], ids=lambda how: how.value)
@long.parametrize("make", MODELS, always=[_Experts])
@on_ranks()
def test_unusual_graphs_train_as_in_one_process(make: Callable[[], nn.Module], how: Run) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        pair = WithOneProcess(make, how, shape=WIDTH)
        pair.train()


def _check_first_call_in(transform: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    expected = transform(lambda y: torch.sin(model(y)).sum(), x)
    compiled = compile_eagerly(model)
    close(transform(lambda y: torch.sin(compiled(y)).sum(), x), expected, "derivative")


def _gradient(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return torch.func.grad(function)(x)


def _tangent(function: Callable[..., Any], x: torch.Tensor) -> Any:
    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


@pytest.mark.skipif(
    not hasattr(_fsdp_common, "_disable_functorch_if_active"),
    reason="Python reads the parameters here, and this torch's FSDP2 cannot gather them inside of a transform (2.11)",
)
@pytest.mark.parametrize("transform", [_gradient, _tangent])
def test_the_first_call_may_be_inside_of_a_transform(transform: Callable[..., Any]) -> None:
    run_ranks(functools.partial(_check_first_call_in, transform), world_size=2)


class _WithTarget(nn.Module):
    """One layer is used with and without gradients in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = torch.tanh(self.layer(x))
        return self.layer(x) - target


def test_a_layer_used_with_and_without_gradients_accumulates() -> None:
    run_ranks(check_accumulation, _WithTarget, WIDTH, world_size=2)
