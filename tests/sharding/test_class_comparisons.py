"""A forward that asks for the very class of a sharded module is refused by its line; others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import UnsupportedModelError, fully_shard
from tests.beside import compile_eagerly
from tests.fake_world import fake_world


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])


class _Is(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if type(layer) is nn.Linear else x
        return x


class _IsIn(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) if self.layers[0].__class__ in (nn.Conv1d, nn.Linear) else x


class _IsNamed(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) if type(self.layers[0]).__name__ == "Linear" else x


class _InMethod(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return _chosen(self.layers[0], x)


def _chosen(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x) if type(layer) == nn.Linear else x  # noqa: E721  what is refused


class _InTable(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {nn.Linear: self.layers[0]}.get(type(self.layers[0]), nn.Identity())(x)  # type: ignore[arg-type]


TABLE = {nn.ReLU: False, nn.Linear: True}


class _InGlobalTable(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) if TABLE[type(self.layers[0])] else x


class _InTableOfClass(_Model):
    linear = (nn.Linear,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) if type(self.layers[0]) in self.linear else x


class _OfItself(_Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) if type(self) is _OfItself else x


class _Allowed(_Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            if type(layer) is nn.Linear:
                nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kinds: Any = (tuple, list)
        is_pair = type(x) in kinds
        is_active = type(self.layers[1]) is nn.ReLU  # has no parameters, and keeps its class
        is_linear = isinstance(self.layers[0], nn.Linear) and type(self.layers[0]).__name__ != "Conv1d"
        return self.layers[0](x) if is_active and is_linear and not is_pair else x


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (_Is, "in _Is.forward"),
        (_IsIn, "in _IsIn.forward"),
        (_IsNamed, "in _IsNamed.forward"),
        (_InMethod, "in _chosen"),
        (_InTable, "in _InTable.forward"),
        (_InGlobalTable, "in _InGlobalTable.forward"),
        (_InTableOfClass, "in _InTableOfClass.forward"),
    ],
)
def test_a_class_is_compared_by_identity(make: type[_Model], line: str) -> None:
    with fake_world(2):
        model = make()
        with pytest.raises(UnsupportedModelError, match="asks whether the class of a module is Linear") as caught:
            fully_shard(model)
        assert __file__ in str(caught.value)
        assert line in str(caught.value)
        assert "isinstance(module, Linear)" in str(caught.value)
        assert type(model.layers[0]) is nn.Linear, "nothing was changed"


def test_the_first_compiled_call_refuses_too() -> None:
    with fake_world(2), pytest.raises(UnsupportedModelError, match="asks whether the class of a module is _OfItself"):
        compile_eagerly(_OfItself())(torch.ones(2, 4))


def test_classes_that_stay_and_other_questions_are_allowed() -> None:
    with fake_world(2):
        model = fully_shard(_Allowed())
        assert model(torch.ones(2, 4)).shape == (2, 4)
