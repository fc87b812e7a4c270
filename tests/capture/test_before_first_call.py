"""What a compile leaves on a model until its first call: it stays until that has sharded it, and goes with it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, compile_eagerly

Call = Callable[[torch.Tensor], Any]


def _kinds(model: nn.Module) -> set[type]:
    return {type(parameter) for parameter in model.parameters()}


def test_a_first_call_that_fails_is_tried_again() -> None:
    model = nn.LSTM(WIDTH, WIDTH)  # Dynamo compiles nothing of it, which would be another occasion
    call = compile_eagerly(model)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no process group"):
            call(torch.ones(3, 2, WIDTH))
    with fake_world(2):
        call(torch.ones(3, 2, WIDTH))
        assert isinstance(model, FSDPModule)


def test_values_in_the_place_of_parameters_are_not_the_first_call() -> None:
    with fake_world(2):
        model = nn.LSTM(WIDTH, WIDTH)
        call: Any = compile_eagerly(model)
        values = {name: torch.zeros_like(p) for name, p in call.named_parameters()}
        torch.func.functional_call(call, values, torch.ones(3, 2, WIDTH))
        assert _kinds(model) == {nn.Parameter}
        call(torch.ones(3, 2, WIDTH))
        assert isinstance(model, FSDPModule)


@pytest.mark.long
@pytest.mark.parametrize("first", ["called", "fully_shard"])
@on_ranks()
def test_every_wrapper_of_a_container_follows_conversions(first: str) -> None:
    """A container with two wrappers, of which the second is called first after a conversion."""
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    pair = WithOneProcess(lambda: nn.Sequential(*layers), Run.PLAIN, shape=WIDTH)
    second = compile_eagerly(pair.model)
    if first == "called":
        pair.backward()
    else:
        fully_shard(pair.model)
    pair.change(lambda model: model.zero_grad())
    pair.change(lambda model: model.double())
    pair.dtype = torch.float64
    pair.call = second
    for _ in range(2):
        pair.backward()
    pair.compare()


@pytest.mark.parametrize("make", [Stack, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))], ids=["class", "Sequential"])
def test_a_model_that_torch_shards_after_its_compile_is_taken_over(make: Callable[[], nn.Module]) -> None:
    with fake_world(2):
        model = make()
        call = compile_eagerly(model)
        fsdp2(model)
        call(torch.ones(2, WIDTH)).sum().backward()
        assert isinstance(model, FSDPModule)
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_lazy_model_is_refused_when_it_is_called_and_not_before() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    call = compile_eagerly(model)
    with fake_world(2), pytest.raises(ConfigError, match="no shape yet"):
        call(torch.ones(2, WIDTH))


@pytest.mark.parametrize("make", [Stack, lambda: nn.Linear(WIDTH, WIDTH)], ids=["class", "of-torch"])
@pytest.mark.parametrize("called", [True, False])
def test_nothing_of_a_compiled_model_is_kept(make: Callable[[], nn.Module], called: bool) -> None:  # noqa: FBT001
    with fake_world(2), torch.no_grad():
        model: nn.Module = make()
        batch = torch.ones(2, WIDTH)
        compiled: Any = compile_eagerly(model)
        if called:
            compiled(batch)
        kept: list[weakref.ref[Any]] = [weakref.ref(batch), weakref.ref(model)]
        del model, batch, compiled
        gc.collect()
        assert [reference() for reference in kept] == [None, None]


def test_a_first_call_whose_forward_fails() -> None:
    with fake_world(2):
        model = Stack()
        call = compile_eagerly(model)
        with pytest.raises(Exception, match="shape"):
            call(torch.ones(2, WIDTH + 1))
        for _ in range(2):
            call(torch.ones(2, WIDTH)).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
