"""Nested regions whose calls differ, at once or later: each call is guarded on what it finds itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from tests.fake_world import fake_world
from tests.ranks import run_ranks

WIDTH = 8


class _Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


class _Doubled(_Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = _Scaled(WIDTH, WIDTH)
        self.b = _Scaled(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x))) * (1 if self.training else 2)


class _Region(_Block):
    forward = torch.compiler.nested_compile_region(_Block.forward)


def _layers(block: type[_Block], change: Callable[[Any], None] | None = None) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(*(block() for _ in range(4)))
    if change is not None:
        change(layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    return layers


def _set_scale(layers: Any) -> None:
    layers[2].a.scale = 3.0


def _evaluate(layers: Any) -> None:
    layers[2].eval()


def _replace_module(layers: Any) -> None:
    layers[3].b = layers[1].b


def _double(layers: Any) -> None:
    layers[3].a = _Doubled(WIDTH, WIDTH)


def _hook(layers: Any) -> None:
    layers[2].b.register_forward_hook(lambda _module, _args, output: 2 * output)


def _tie(layers: Any) -> None:
    layers[2].b.weight = layers[2].a.weight


@pytest.mark.core
@pytest.mark.parametrize("change", [_set_scale, _evaluate, _double, _hook, _tie])
def test_layers_may_differ_from_the_first(change: Callable[[Any], None]) -> None:
    x = torch.linspace(-1, 1, WIDTH)
    torch._dynamo.reset()
    with fake_world(1):
        expected = _layers(_Block, change)(x)
        model = _layers(_Region, change)
        assert torch.equal(
            torch.compile(model, backend="fsdp", options={"lower": "eager"}, fullgraph=True)(x), expected
        )


@pytest.mark.core
@pytest.mark.parametrize("change", [_set_scale, _evaluate, _replace_module])
def test_a_layer_may_change_later(change: Callable[[Any], None]) -> None:
    x = torch.linspace(-1, 1, WIDTH)
    torch._dynamo.reset()
    with fake_world(1):
        expected, model = _layers(_Block), _layers(_Region)
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"}, fullgraph=True)
        assert torch.equal(compiled(x), expected(x))
        change(expected)
        change(model)
        assert torch.equal(compiled(x), expected(x))


def test_a_call_with_other_values_finds_them() -> None:
    x = torch.linspace(-1, 1, WIDTH)
    values = {"2.a.weight": torch.full((WIDTH, WIDTH), 0.1)}
    torch._dynamo.reset()
    with fake_world(1):
        expected = torch.func.functional_call(_layers(_Block), values, (x,))
        model = _layers(_Region)
        model.compile(backend="fsdp", options={"lower": "eager"})
        assert not torch.equal(model(x), expected)
        assert torch.equal(torch.func.functional_call(model, values, (x,)), expected)


def _gradients(block: type[_Block]) -> list[torch.Tensor | None]:
    """Of the third layer: as set, divided by another factor, not synchronized, and synchronized."""
    torch._dynamo.reset()
    model = _layers(block)
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    found: list[torch.Tensor | None] = []
    for step in range(4):
        if step == 1:
            model[2].set_gradient_divide_factor(50.0)
        elif step == 2:
            model[2].set_gradient_divide_factor(2.0)
        if step >= 2:
            model[2].set_requires_gradient_sync(step == 3)
        compiled(torch.ones(2, WIDTH)).square().sum().backward()
        gradient = model[2].a.weight.grad
        found.append(gradient.to_local().clone() if isinstance(gradient, DTensor) else gradient)
        model.zero_grad()
    return found


def _compare_gradients() -> list[bool]:
    """Of each step, whether there was a gradient; regions change no bit."""
    pairs = list(zip(_gradients(_Region), _gradients(_Block), strict=True))
    for found, expected in pairs:
        assert (found is None) == (expected is None)
        assert found is None or expected is None or torch.equal(found, expected)
    return [found is not None for found, _ in pairs]


def test_a_layer_may_be_reduced_otherwise() -> None:
    assert run_ranks(_compare_gradients, world_size=2) == [[True, True, False, True]] * 2
