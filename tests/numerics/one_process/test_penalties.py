"""Penalties over `self.parameters()` inside of a forward see full parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests import long
from tests.models.kinds import Slim
from tests.numerics.one_process.measure import gradient_difference
from tests.ranks import run_ranks
from tests.two_sides import WithOneProcess, share


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
    pair = WithOneProcess(make, shape=32, rows=4, twice=False)
    batch = pair.batch(1)
    pair.call(share(batch)).backward()
    pair.reference(batch).backward()
    gradient = gradient_difference(*pair)
    with torch.no_grad():
        expected = pair.reference(batch)
        return gradient, ((pair.call(batch) - expected) / expected).abs().item()


@pytest.mark.core
@long.parametrize("make", [_Squares, _Undifferentiated, _Norm, _Children], always=[_Norm])
def test_a_penalty_over_parameters_is_one_of_full_parameters(make: Callable[[], nn.Module]) -> None:
    for gradient, inference in run_ranks(_differences, make):
        assert gradient < 1e-5
        assert inference < 1e-6
