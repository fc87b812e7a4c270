"""Parametrized modules train as in one process; to add or remove parametrizations later is refused by name."""

from __future__ import annotations

import abc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fsdp_compile import FSDPCompileError, fully_shard
from tests import long
from tests.beside import Beside, Run, compile_eagerly
from tests.fake_world import fake_world
from tests.ranks import run_ranks

FORMS: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "module": compile_eagerly,
    "function": lambda model: compile_eagerly(lambda x: model(x)),  # noqa: PLW0108  a compiled function
    "eager": fully_shard,
}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _refusal(form: str, change: Callable[[nn.Linear], object], model: _Model) -> str:
    """What is said when the layer of a model is changed between two calls."""
    with fake_world(2):
        call = FORMS[form](model)
        call(torch.ones(2, 6))

        def change_and_call() -> None:
            change(model.layer)
            call(torch.ones(2, 6))

        with pytest.raises(FSDPCompileError) as caught:
            change_and_call()
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_one_that_is_added(form: str) -> None:
    message = _refusal(form, parametrizations.weight_norm, _Model())
    assert "a sharded parameter was parametrized\n  where: layer.weight" in message
    assert "before fully_shard() or the first compiled call" in message


@pytest.mark.parametrize("form", FORMS)
def test_one_that_is_removed(form: str) -> None:
    model = _Model()
    parametrizations.weight_norm(model.layer)
    message = _refusal(form, lambda layer: parametrize.remove_parametrizations(layer, "weight"), model)
    assert "a parametrization is removed from a sharded module" in message
    assert "Linear, weight" in message
    assert parametrize.is_parametrized(model.layer, "weight"), "it was changed"


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_norm_of_the_older_kind(form: str) -> None:
    message = _refusal(form, nn.utils.weight_norm, _Model())
    assert "computed from sharded ones" in message
    assert "where: Linear, weight" in message


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
    pair = Beside(lambda: _parametrized(layer), how)
    pair.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for _ in range(3):
        pair.step()
    assert isinstance(pair.model.layer, nn.Module)
    with pytest.raises(FSDPCompileError, match="a parametrization is removed from a sharded module"):
        parametrize.remove_parametrizations(pair.model.layer, "weight")


@pytest.mark.parametrize("how", [Run.PLAIN, Run.EAGER])
@long.parametrize("layer", [nn.Linear, _Abstract, _OfAMetaclass], always=[_OfAMetaclass])
def test_it_trains_whatever_the_metaclass(layer: type[nn.Linear], how: Run) -> None:
    run_ranks(_train, layer, how)
