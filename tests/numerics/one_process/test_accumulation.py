"""Gradients that wait: microbatches without communication equal one process on all the data, and FSDP2 bit by bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard, no_sync
from tests import long
from tests.models.kinds import Slim
from tests.numerics.one_process.measure import gradient_difference
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, sgd

CLOSE = 1e-5
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


STRATEGIES = ("full", "zero2")
"""Those of which microbatches keep something; all are in test_strategies.py."""


def make_pair(
    strategy: str = "full",
    make: Callable[[], nn.Module] = Slim,
    how: Run = Run.SHARDED,
    *,
    dynamic: bool | None = None,
) -> WithOneProcess:
    shard = functools.partial(fully_shard, reshard_after_forward=strategy != "zero2")
    return WithOneProcess(make, how, shard, optimizer=sgd, shape=32, rows=4, twice=False, dynamic=dynamic)


def gradients_are_none(model: nn.Module) -> bool:
    return all(p.grad is None for p in model.parameters())


@dataclasses.dataclass
class Held:
    """What is seen in steps whose first microbatches are in `no_sync`.

    Attributes:
        differences: Of gradients after the last microbatch of each step.
        none: Whether gradients are `None` between microbatches, in each step.
        recompiles: Graphs that are compiled after the first step.
    """

    differences: list[float] = dataclasses.field(default_factory=list)
    none: list[bool] = dataclasses.field(default_factory=list)
    recompiles: int = 0


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.core
@long.parametrize("strategy", STRATEGIES, always=["zero2"])
@on_ranks()
def test_gradients_wait_for_the_next_backward_that_reduces(strategy: str) -> None:
    pair = make_pair(strategy)
    found = Held()
    for _ in range(2):
        compiled = _graphs()
        with no_sync(pair.call):
            pair.backward()
            pair.backward()
        found.none.append(gradients_are_none(pair.model))
        pair.backward()
        found.differences.append(gradient_difference(*pair))
        pair.update()
        found.recompiles = _graphs() - compiled
    assert max(found.differences) < CLOSE
    assert all(found.none)
    assert found.recompiles == 0


class ReadTwice(nn.Module):
    """Adds two gradients of one parameter in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,oi->bo", x + x @ self.weight, self.weight).tanh()


@pytest.mark.long
@on_ranks()
def test_accumulated_gradients_are_no_open_sizes() -> None:
    pair = make_pair(make=ReadTwice, dynamic=True)
    found = []
    for _ in range(2):
        with no_sync(pair.call):
            pair.backward()
        pair.backward()
        found.append(gradient_difference(*pair))
        pair.update()
    assert max(found) < CLOSE


@pytest.mark.long
@on_ranks()
def test_no_sync_leaves_gradients_as_they_were() -> None:
    pair = make_pair()
    pair.backward()
    before = [p.grad.to_local().clone() for p in pair.model.parameters() if isinstance(p.grad, DTensor)]
    with no_sync(pair.call):
        pair.backward()
    after = [p.grad.to_local() for p in pair.model.parameters() if isinstance(p.grad, DTensor)]
    assert len(before) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pair.backward()
    assert gradient_difference(*pair) < CLOSE
