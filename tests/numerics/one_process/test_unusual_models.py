"""Models that reach their parameters in unusual ways, and first calls, train to the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fsdp_compile import UnsupportedModelError, fully_shard
from tests import long
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.models.unusual import KINDS
from tests.numerics.one_process.measure import train_pair
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess

LEFT_TO_PYTHON = ("recurrent", "recurrent-first", "experts")
"""No frame of these reaches the backend: they have to be sharded before."""


@pytest.mark.core
@long.parametrize("name", [name for name in KINDS if name not in LEFT_TO_PYTHON], always=["several-dtypes"])
@on_ranks()
def test_sharded_at_the_first_call(name: str) -> None:
    train_pair(KINDS[name])


@pytest.mark.core
@long.parametrize("name", [*LEFT_TO_PYTHON, "penalty-of-blocks"], always=["penalty-of-blocks"])
@on_ranks()
def test_sharded_before_the_compile(name: str) -> None:
    train_pair(KINDS[name], prepare=fully_shard)


@pytest.mark.long
@on_ranks()
def test_through_inductor() -> None:
    train_pair(KINDS["reads-of-another"], lower="inductor")


class _Slow(nn.Module):
    """A teacher that follows the student inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(32, 5), nn.Linear(32, 5).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, slow in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            slow.mul_(0.9).add_(mine, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        return self.student(x) - self.teacher(x)


class _Clamped(nn.Module):
    """Writes into what a read gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return x * self.weight


@pytest.mark.parametrize(("make", "line"), [(_Slow, "slow.mul_"), (_Clamped, "clamp_")])
def test_updates_inside_of_a_graph_are_refused_with_their_line(make: Callable[[], nn.Module], line: str) -> None:
    with fake_world(2), pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(make(), backend="fsdp", options={"lower": "eager"})(torch.ones(2, 32))
    error = caught.value.inner_exception
    assert isinstance(error, UnsupportedModelError)
    assert "changes a gathered parameter in place" in error.what
    assert line in (error.where or "")
    assert "between steps" in (error.instead or "")


class ReadEarly(Stack):
    """Reads parameters in code that Dynamo leaves to Python, before its first graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    @torch._dynamo.disable
    def early(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.early(x))


@pytest.mark.long
@on_ranks()
def test_parameters_read_before_the_first_graph_get_their_gradients() -> None:
    train_pair(ReadEarly)


@long.parametrize("world_size", [1, 2], always=[2])
@on_ranks(world_size=lambda world_size: world_size)
def test_a_flat_shard_of_one_padded_slot(world_size: int) -> None:
    WithOneProcess(lambda: nn.Linear(6, 7, bias=False), Run.PLAIN, twice=False).train(steps=1)
