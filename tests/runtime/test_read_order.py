"""Ranks that read or reduce other parameters of the same shape are told so before a parameter changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_compile
from fsdp_compile import RankMismatchError, fully_shard
from tests import long
from tests.ranks import run_ranks

OPTIONS: Any = {"lower": "eager"}


class Picks(nn.Module):
    """Runs layers of one kind in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x


def _model(way: str, **settings: Any) -> Picks:
    model = Picks()
    for layer in model.layers:
        fully_shard(layer, **settings)
        if way == "compiled":
            layer.compile(backend="fsdp", options=OPTIONS)
    return fully_shard(model, **settings)


def _values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local().clone() for parameter in model.parameters() if isinstance(parameter, DTensor)]


def _train(model: Picks, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8), (0, 1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _refusal(model: Picks, run: Any) -> str:
    """The message with which all ranks refuse to go on, when parameters are what they were before."""
    before = _values(model)
    with pytest.raises(RankMismatchError) as caught:
        run()
    assert all(torch.equal(was, now) for was, now in zip(before, _values(model), strict=True))
    return str(caught.value)


def _other_order(way: str, *, grad: bool) -> str:
    """Rank 1 runs the first two layers the other way round, after a step in which both did the same."""
    model = _model(way)
    _train(model, torch.optim.SGD(model.parameters(), 0.1))

    def forward() -> None:
        with torch.set_grad_enabled(grad):
            model(torch.ones(2, 8), (1, 0, 2) if dist.get_rank() == 1 else (0, 1, 2))

    return _refusal(model, forward)


@pytest.mark.core
@long.parametrize("grad", [True, False], always=[False])
@pytest.mark.parametrize("way", ["compiled", "uncompiled"])
def test_another_layer_of_the_same_shape_is_named_on_every_rank(way: str, *, grad: bool) -> None:
    messages = run_ranks(_other_order, way, grad=grad, timeout_s=100)
    assert messages[0] == messages[1]
    assert "rank 0 and rank 1 gather or reduce different parameters" in messages[0]
    zero, one = messages[0].split("where: ")[1].split("instead:")[0].split(" on rank 0, ")
    assert "layers.0." in zero
    assert "layers.1." in one


def _other_backward(way: str) -> str:
    """All ranks run the same forwards, and rank 1 another backward."""
    model = _model(way)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(2, 8)

    def step(order: tuple[int, ...]) -> None:
        outputs = [torch.tanh(layer(x)) for layer in model.layers]
        for number in order:
            outputs[number].sum().backward()
        optimizer.step()

    step((0, 1, 2))
    return _refusal(model, lambda: step((0, 1, 2) if dist.get_rank() == 0 else (0, 2, 1)))


@pytest.mark.core
@pytest.mark.parametrize("way", ["compiled", "uncompiled"])
def test_backwards_in_another_order_are_named(way: str) -> None:
    for message in run_ranks(_other_backward, way, timeout_s=100):
        assert "reduces gradients of layers.1." in message
        assert "reduces gradients of layers.2." in message


def _updated_in_backward() -> str:
    model = _model("compiled")
    optimizer = fsdp_compile.step_in_backward(torch.optim.SGD(model.parameters(), 0.1))
    x = torch.ones(2, 8)

    def step(order: tuple[int, ...]) -> None:
        outputs = [torch.tanh(layer(x)) for layer in model.layers]
        for number in order:
            outputs[number].sum().backward()
        optimizer.step()

    step((0, 1, 2))
    return _refusal(model, lambda: step((2,) if dist.get_rank() == 0 else (1,)))


@pytest.mark.long
def test_an_update_in_backward_waits_for_the_comparison() -> None:
    for message in run_ranks(_updated_in_backward, timeout_s=100):
        assert "reduces gradients of layers.1." in message


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)


def _function() -> str:
    """A compiled function that calls one of two models: no module's own call surrounds its graph."""
    models = _Branches()
    for part in (models.one, models.two):
        fully_shard(part)
    run = torch.compile(lambda model, x: model(x), backend="fsdp", options=OPTIONS)
    with torch.no_grad():
        for model in (models.one, models.two):
            run(model, torch.ones(2, 8))
        with pytest.raises(RankMismatchError) as caught:
            run(models.one if dist.get_rank() == 0 else models.two, torch.ones(2, 8))
    return str(caught.value)


def test_models_that_share_a_graph_are_told_apart() -> None:
    assert len(set(run_ranks(_function, timeout_s=100))) == 1


def _other_replicas(way: str) -> str:
    """The ranks of each shard group run the same layers, and the second replica others than the first."""
    model = _model(way, mesh=init_device_mesh("cpu", (2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _train(model, optimizer)
    order = (1, 0, 2) if dist.get_rank() >= 2 else (0, 1, 2)

    def evaluate() -> None:
        with torch.no_grad():  # which communicates within each shard group alone
            model(torch.ones(2, 8), order)

    evaluate()
    return _refusal(model, lambda: model(torch.ones(2, 8), order).sum().backward())


@long.parametrize("way", ["compiled", "uncompiled"], always=["compiled"])
def test_replicas_are_compared_in_backward(way: str) -> None:
    messages = run_ranks(_other_replicas, way, world_size=4, timeout_s=100)
    assert "rank 0 and rank 2 gather or reduce different parameters" in messages[0]
    assert "rank 1 and rank 3" in messages[3]


def _same_everywhere(way: str) -> float:
    """Orders that change from step to step, alike on all ranks; the comparison must let them pass."""
    model = _model(way)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for order in ((0, 1, 2), (2, 0), (1,), (1, 1, 0), (0, 1, 2)):
        loss = model(torch.ones(2, 8), order).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 8), order[::-1])
    return loss.item()


@pytest.mark.core
@long.parametrize("way", ["compiled", "uncompiled"], always=["compiled"])
def test_orders_that_change_alike_pass(way: str) -> None:
    first, second = run_ranks(_same_everywhere, way, timeout_s=100)
    assert first == second
