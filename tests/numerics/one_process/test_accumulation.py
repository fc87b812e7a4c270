"""Gradients that wait: microbatches without communication equal one process on all the data, and FSDP2 bit by bit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard, no_sync
from tests.models.kinds import Slim
from tests.numerics.one_process.pair import batches, loss_of
from tests.ranks import run_ranks

CLOSE = 1e-5
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclasses.dataclass
class Pair:
    """A sharded compiled model, and a copy of it in one process."""

    model: nn.Module
    compiled: nn.Module
    reference: nn.Module

    def backward(self, batch: torch.Tensor) -> None:
        """One microbatch on both."""
        world, rank = dist.get_world_size(), dist.get_rank()
        loss_of(self.compiled(batch.chunk(world)[rank])).backward()
        loss_of(self.reference(batch)).backward()

    def difference(self) -> float:
        """The largest difference of gradients, relative to the largest element of each."""
        worst = 0.0
        for (name, p), q in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                assert isinstance(p.grad, DTensor)
                worst = max(worst, ((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()).item())
        return worst

    def step(self) -> None:
        """One step of plain gradient descent on both."""
        for parameters in (self.model.parameters(), self.reference.parameters()):
            torch.optim.SGD(parameters, lr=0.1).step()
        self.model.zero_grad()
        self.reference.zero_grad()


STRATEGIES = ("full", "zero2")
"""Those of which microbatches keep something; all are in test_strategies.py."""


def make_pair(
    strategy: str = "full",
    make: Callable[[], nn.Module] = Slim,
    *,
    shard: bool = True,
    dynamic: bool | None = None,
) -> Pair:
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    if shard:
        fully_shard(model, reshard_after_forward=strategy != "zero2")
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"}, dynamic=dynamic)
    return Pair(model, compiled, reference)  # type: ignore[arg-type]


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


def _no_sync(strategy: str) -> Held:
    pair = make_pair(strategy)
    world = dist.get_world_size()
    found = Held()
    for step in range(2):
        compiled = _graphs()
        first, second, last = batches(3, 4 * world, seed=step)
        with no_sync(pair.compiled):
            pair.backward(first)
            pair.backward(second)
        found.none.append(gradients_are_none(pair.model))
        pair.backward(last)
        found.differences.append(pair.difference())
        pair.step()
        found.recompiles = _graphs() - compiled
    return found


@pytest.mark.core
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_wait_for_the_next_backward_that_reduces(strategy: str) -> None:
    for found in run_ranks(_no_sync, strategy):
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


def _with_open_sizes() -> list[float]:
    pair = make_pair(make=ReadTwice, dynamic=True)
    found = []
    for step in range(2):
        first, last = batches(2, 4 * dist.get_world_size(), seed=step)
        with no_sync(pair.compiled):
            pair.backward(first)
        pair.backward(last)
        found.append(pair.difference())
        pair.step()
    return found


@pytest.mark.long
def test_accumulated_gradients_are_no_open_sizes() -> None:
    for found in run_ranks(_with_open_sizes):
        assert max(found) < CLOSE


def _gradients_before_no_sync() -> tuple[bool, float]:
    pair = make_pair()
    first, second, last = batches(3, 4 * dist.get_world_size())
    pair.backward(first)
    before = [p.grad.to_local().clone() for p in pair.model.parameters() if isinstance(p.grad, DTensor)]
    with no_sync(pair.compiled):
        pair.backward(second)
    after = [p.grad.to_local() for p in pair.model.parameters() if isinstance(p.grad, DTensor)]
    kept = len(before) > 0 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pair.backward(last)
    return kept, pair.difference()


def test_no_sync_leaves_gradients_as_they_were() -> None:
    for kept, difference in run_ranks(_gradients_before_no_sync):
        assert kept
        assert difference < CLOSE
