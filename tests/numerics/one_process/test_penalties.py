"""Penalties over `self.parameters()` inside of a forward see full parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from tests import long
from tests.beside import compile_eagerly
from tests.models.kinds import Slim
from tests.numerics.one_process.pair import batches, gradient_difference
from tests.ranks import run_ranks


class _Squares(Slim):
    """The mean square of the output, and a penalty."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x).square().mean()
        return loss * (1 + self.penalty())

    def penalty(self) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()


class _Undifferentiated(_Squares):
    """A factor, to autograd."""

    def penalty(self) -> torch.Tensor:
        with torch.no_grad():
            return super().penalty()


class _Norm(_Squares):
    """Of everything at once: its gradient uses one intermediate value of parameters alone twice."""

    def penalty(self) -> torch.Tensor:
        return torch.cat([p.flatten() for p in self.parameters()]).norm()


class _Children(_Squares):
    """Of matrices of two blocks."""

    def penalty(self) -> torch.Tensor:
        return sum((p.abs().sum() for n, p in self.blocks.named_parameters() if "weight" in n), torch.zeros(()))


def _differences(make: Callable[[], nn.Module]) -> tuple[float, float]:
    """Of gradients, and of the loss in inference."""
    (batch,) = batches(1, 4 * dist.get_world_size())
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    compiled = torch.compile(fully_shard(model), backend="fsdp", options={"lower": "eager"})
    compiled(batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
    reference(batch).backward()
    gradient = gradient_difference(model, reference)
    with torch.no_grad():
        expected = reference(batch)
        return gradient, ((compiled(batch) - expected) / expected).abs().item()


@pytest.mark.core
@long.parametrize("make", [_Squares, _Undifferentiated, _Norm, _Children], always=[_Norm])
def test_a_penalty_over_parameters_is_one_of_full_parameters(make: Callable[[], nn.Module]) -> None:
    for gradient, inference in run_ranks(_differences, make):
        assert gradient < 1e-5
        assert inference < 1e-6


def _outside_of_the_forward() -> float:
    """As docs/limits.md says to write it."""
    (batch,) = batches(1, 4 * dist.get_world_size())
    torch.manual_seed(0)
    model = Slim()
    reference = copy.deepcopy(model)
    mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
    for call, each, x in ((compile_eagerly(fully_shard(model)), model, mine), (reference, reference, batch)):
        penalty = torch.stack([p.square().sum() for p in each.parameters()]).sum()
        whole = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
        (call(x).square().mean() + 0.1 * whole).backward()
    return gradient_difference(model, reference)


def test_a_penalty_outside_of_the_forward_is_made_whole() -> None:
    assert max(run_ranks(_outside_of_the_forward)) < 1e-5
