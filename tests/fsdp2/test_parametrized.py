"""Parametrized modules train as in one process."""

from __future__ import annotations

import abc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests import long
from tests.ranks import run_ranks
from tests.two_sides import Run, WithOneProcess


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class _Counted(abc.ABCMeta):
    """A metaclass of a user's own."""

    def __call__(cls, *args: object, **kwargs: object) -> object:
        made = super().__call__(*args, **kwargs)
        made.was_made = True
        return made


class _Abstract(nn.Linear, abc.ABC):
    """`abc.ABC` brings a metaclass along."""


class _OfAMetaclass(nn.Linear, metaclass=_Counted):
    """Has one of a user's."""


def _parametrized(layer: type[nn.Linear]) -> nn.Module:
    model = _Model()
    model.layer = layer(6, 6)
    parametrizations.weight_norm(model.layer)
    return model


def _train(layer: type[nn.Linear], how: Run) -> None:
    pair = WithOneProcess(lambda: _parametrized(layer), how)
    pair.train(steps=3)


@pytest.mark.parametrize("how", [Run.PLAIN, Run.SHARDED])
@long.parametrize("layer", [nn.Linear, _Abstract, _OfAMetaclass], always=[_OfAMetaclass])
def test_it_trains_whatever_the_metaclass(layer: type[nn.Linear], how: Run) -> None:
    run_ranks(_train, layer, how)
