"""Parametrized modules train as in one process; parametrizations of sharded ones are an error by name."""

from __future__ import annotations

import abc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fsdp_compile import UnsupportedModelError, fully_shard
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, compile_eagerly


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


@pytest.mark.parametrize("how", [Run.PLAIN, Run.SHARDED])
@long.parametrize("layer", [nn.Linear, _Abstract, _OfAMetaclass], always=[_OfAMetaclass])
@on_ranks()
def test_it_trains_whatever_the_metaclass(layer: type[nn.Linear], how: Run) -> None:
    pair = WithOneProcess(lambda: _parametrized(layer), how)
    pair.train(steps=3)


class _Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@pytest.mark.parametrize("how", ["compiled", "function", "uncompiled", "before the first call"])
@on_ranks(timeout_s=60)
def test_a_parametrization_of_a_sharded_parameter_is_refused_by_name(how: str) -> None:
    model = fully_shard(_Model())
    compiled: Any = compile_eagerly((lambda x: model(x)) if how == "function" else model)  # noqa: PLW0108
    x = torch.ones(2, 6)
    if how != "before the first call":
        compiled(x).sum().backward()
    parametrize.register_parametrization(model.layer, "weight", _Doubled())
    call = model if how == "uncompiled" else compiled
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"parametrized\n  where: (layer|Param.*)\.weight"):
            call(x)
