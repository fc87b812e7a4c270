"""Values in the place of parameters: `torch.func.functional_call`, and weights that code swaps by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests import long
from tests.ranks import run_ranks
from tests.two_sides import Run, WithOneProcess


class _FastWeights(nn.Module):
    """Calls a layer with values made of its weights, as model-agnostic meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def values(self) -> dict[str, torch.Tensor]:
        return {name: p * 1.5 - 0.1 for name, p in self.layer.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional_call(self.layer, self.values(), (x,)) + self.layer(x))


class _Broken(_FastWeights):
    """A graph break comes before the call, so that only the layer's own forward is compiled."""

    @torch._dynamo.disable(recursive=False)
    def call(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.layer, self.values(), (x,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.call(x) + self.layer(x))


class _Generated(nn.Module):
    """Replaces a layer's weight by one that another layer computes, for one call."""

    def __init__(self) -> None:
        super().__init__()
        self.hyper, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.layer.weight
        del self.layer.weight
        setattr(self.layer, "weight", self.hyper.weight * 2)  # noqa: B010  typed as a parameter
        y = self.layer(x)
        del self.layer.weight
        self.layer.weight = kept
        return y + self.layer(x)


class _PutBack(_Generated):
    """The same with the weight that a forward reads, which is put back by both ways there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: Any = self.layer.weight
        for put_back in (self.layer.register_parameter, lambda name, value: setattr(self.layer, name, value)):
            del self.layer.weight
            setattr(self.layer, "weight", self.hyper.weight * 2)  # noqa: B010  typed as a parameter
            x = self.layer(x)
            del self.layer.weight
            put_back("weight", kept)
        return self.layer(x)


class _Tied(nn.Module):
    """Two layers share a weight; the value for one is one for both."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.both[1].weight = self.both[0].weight
        self.value = nn.Parameter(torch.eye(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.both, {"0.weight": self.value * 2}, (x,))


def _check(make: Callable[[], nn.Module], how: Run) -> None:
    pair = WithOneProcess(make, how)
    pair.train()


@long.parametrize("make", [_FastWeights, _Broken, _Generated, _PutBack, _Tied], always=[_Generated])
def test_compiled_code_reads_values_that_are_swapped_around_it(make: Callable[[], nn.Module]) -> None:
    run_ranks(_check, make, Run.SHARDED)


@pytest.mark.long
def test_a_plain_model_with_functional_calls_is_sharded_and_left_to_python() -> None:
    run_ranks(_check, _FastWeights, Run.PLAIN)
