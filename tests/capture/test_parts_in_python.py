"""Parts of a model that run in Python behind graph breaks, in the first call, which shards the model as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_compile.modules import forward
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.fake_world import fake_world


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.tanh(self.linear(x))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return x


def _in_place(model: nn.Module, settings: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
    model.compile(**settings)
    return model


def _by_a_function(model: nn.Module, settings: dict[str, Any]) -> Callable[[torch.Tensor], Any]:
    def function(x: torch.Tensor) -> Any:
        return model(x)

    return torch.compile(function, **settings)


@pytest.mark.filterwarnings("ignore:Dynamo runs the call")
@pytest.mark.parametrize("compiled", [_in_place, _by_a_function])
def test_are_checked_with_the_model(compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    checked: list[str] = []
    check = forward._pre_forward

    def note(module: nn.Module) -> Any:
        checked.append(type(module).__name__)
        return check(module)

    monkeypatch.setattr(forward, "_pre_forward", note)
    options = {"lower": "eager", "auto_wrap_policy": ModuleWrapPolicy({_Block})}
    with fake_world(2):
        call = compiled(_Model(), {"backend": "fsdp", "options": options})
        call(torch.ones(2, 4)).sum().backward()
        assert checked == []
        call(torch.ones(2, 4)).sum().backward()
        assert checked == ["FSDP_Model"]
