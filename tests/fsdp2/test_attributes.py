"""What users and libraries put on a parameter (`p.tag = ...`) is found on it in a forward, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests import long
from tests.beside import Beside, Run
from tests.ranks import run_ranks


@dataclasses.dataclass
class Shape:
    """As muP's `infshape`."""

    width: float


class Tagged(nn.Module):
    """A forward that does something else for each attribute of its parameters, or without it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.tied = nn.Linear(6, 8)
        self.tied.weight = self.up.weight
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.up.weight
        if self.breaks:
            torch._dynamo.graph_break()
        x = F.linear(x, weight, self.up.bias) * getattr(weight, "tag", 5)
        x = torch.tanh(x * getattr(weight, "scales", 1))
        if hasattr(self.down.weight, "shape_of"):
            x = x * self.down.weight.shape_of.width
        for name, parameter in self.named_parameters():
            if getattr(parameter, "regularized", False):
                x = x + parameter.square().mean() * len(name)
        return self.down(x) * getattr(self.tied.weight, "tag", 7)


def _tag(model: nn.Module) -> None:
    up, down = (model.get_parameter(f"{name}.weight") for name in ("up", "down"))
    up.tag = 2  # type: ignore[attr-defined]
    up.scales = torch.linspace(0.5, 2, 8)  # type: ignore[attr-defined]
    down.shape_of = Shape(0.25)  # type: ignore[attr-defined]
    up.partner, down.partner = down, up  # type: ignore[attr-defined]
    model.get_parameter("up.bias").regularized = True  # type: ignore[attr-defined]


def _tagged() -> nn.Module:
    model = Tagged()
    _tag(model)
    return model


def _tagged_pair(how: Run) -> Beside:
    pair = Beside(_tagged, how)
    _tag(pair.reference)  # a deep copy has lost them
    return pair


def _break(model: nn.Module) -> None:
    assert isinstance(model, Tagged)
    model.breaks = True


def _change(model: nn.Module) -> None:
    weight: Any = model.get_parameter("up.weight")
    weight.tag = 3
    del weight.scales


def _there_from_the_start(how: Run) -> None:
    pair = _tagged_pair(how)
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1))
    pair.step()
    pair.change(_change)
    pair.step()
    pair.change(_break)
    pair.step()


def _put_there_later(how: Run) -> None:
    """After the first step; and taken away again."""
    pair = Beside(Tagged, how)
    pair.optimize(lambda p: torch.optim.SGD(p, lr=0.1))
    pair.step()
    pair.change(_tag)
    pair.step()
    pair.change(lambda model: vars(model.get_parameter("down.weight")).pop("shape_of"))
    pair.step()


@long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED], ids=lambda how: how.value)
@long.parametrize("check", [_there_from_the_start, _put_there_later], always=[_put_there_later])
def test_a_forward_that_reads_attributes_trains_as_in_one_process(check: Callable[[Run], None], how: Run) -> None:
    run_ranks(check, how)


def _count() -> int:
    pair = _tagged_pair(Run.PLAIN)
    graphs = []
    for count in range(4):
        pair.change(lambda model: setattr(model.get_parameter("down.bias"), "total", torch.ones(3) * count))  # noqa: B023
        pair.backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs[-1] - graphs[1]


def test_a_tensor_that_is_put_on_a_parameter_in_every_step_compiles_nothing_again() -> None:
    assert run_ranks(_count) == [0, 0]
