"""What a compile leaves on a model until its first call: it stays until that has sharded it, and goes with it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard, units
from fsdp_compile._torch import fully_shard as private
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Stack
from tests.ranks import run_ranks
from tests.two_sides import Run, WithOneProcess, close, compile_eagerly

Call = Callable[[torch.Tensor], Any]


def _in_place(model: nn.Module) -> Call:
    model.compile(backend="fsdp", options={"lower": "eager"})
    return model


FORMS: dict[str, Callable[[nn.Module], Call]] = {"module": compile_eagerly, "module.compile": _in_place}


def _kinds(model: nn.Module) -> set[type]:
    return {type(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("form", FORMS)
def test_a_first_call_that_fails_is_tried_again(form: str) -> None:
    model = nn.LSTM(WIDTH, WIDTH)  # Dynamo compiles nothing of it, which would be another occasion
    call = FORMS[form](model)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no process group"):
            call(torch.ones(3, 2, WIDTH))
    with fake_world(2):
        call(torch.ones(3, 2, WIDTH))
        assert isinstance(model, FSDPModule)


@pytest.mark.parametrize("form", FORMS)
def test_values_in_the_place_of_parameters_are_not_the_first_call(form: str) -> None:
    with fake_world(2):
        model = nn.LSTM(WIDTH, WIDTH)
        call: Any = FORMS[form](model)
        values = {name: torch.zeros_like(p) for name, p in call.named_parameters()}
        torch.func.functional_call(call, values, torch.ones(3, 2, WIDTH))
        assert _kinds(model) == {nn.Parameter}
        call(torch.ones(3, 2, WIDTH))
        assert isinstance(model, FSDPModule)


def _converted(first: str) -> None:
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


@pytest.mark.long
@pytest.mark.parametrize("first", ["called", "fully_shard"])
def test_every_wrapper_of_a_container_follows_conversions(first: str) -> None:
    run_ranks(_converted, first)


@pytest.mark.parametrize("make", [Stack, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))], ids=["class", "Sequential"])
def test_a_model_that_torch_shards_after_its_compile_is_taken_over(make: Callable[[], nn.Module]) -> None:
    with fake_world(2):
        model = make()
        call = compile_eagerly(model)
        fsdp2(model)
        call(torch.ones(2, WIDTH)).sum().backward()
        assert isinstance(model, FSDPModule)
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("other", [{"backend": "eager"}, {"backend": "fsdp", "disable": True}])
def test_another_compile_in_place_takes_the_place_of_the_first(other: dict[str, Any]) -> None:
    model = Stack()
    expected = copy.deepcopy(model)
    _in_place(model)
    model.compile(**other)
    model(torch.ones(2, WIDTH)).sum().backward()
    expected(torch.ones(2, WIDTH)).sum().backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert type(mine) is nn.Parameter
        assert mine.grad is not None
        close(mine.grad, theirs.grad, "gradient")
    assert not model._forward_pre_hooks


def test_the_options_of_the_last_compile_in_place_count() -> None:
    with fake_world(2):
        model = Stack()
        _in_place(model)
        model.compile(backend="fsdp", options={"lower": "eager", "reshard_after_forward": False})
        model(torch.ones(2, WIDTH))
        states = [state for part in model.modules() if (state := private.state_of(part)) is not None]
        assert len(states) > 1
        assert all(group.post_forward_mesh_info is None for state in states for group in private.groups_of(state))


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("make", [nn.Linear, lambda *widths: nn.Sequential(nn.Linear(*widths))])
def test_a_module_of_a_class_of_torch_is_compiled_in_place(make: Callable[..., nn.Module], sharded: bool) -> None:  # noqa: FBT001
    with fake_world(2):
        model = make(WIDTH, WIDTH)
        if sharded:
            fsdp2(model)
        _in_place(model)
        for _ in range(
            2
        ):  # the first compile of a process imports the backend, and the first call after it has no graph
            model(torch.ones(2, WIDTH)).sum().backward()
        assert any(unit.compiled_regions for unit in units(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy], ids=["deepcopy", "copy"])
def test_copies_are_plain_and_the_model_is_not(copied: Callable[[nn.Module], nn.Module]) -> None:
    with fake_world(2):
        model = nn.Linear(WIDTH, WIDTH)
        _in_place(model)
        other = copied(model)
        other(torch.ones(2, WIDTH))
        assert not isinstance(other, FSDPModule)
        model(torch.ones(2, WIDTH))
        assert isinstance(model, FSDPModule)


def test_a_deep_copy_can_be_pickled_once_it_was_called() -> None:
    model = Stack()
    _in_place(model)
    other = copy.deepcopy(model)
    other(torch.ones(2, WIDTH)).sum().backward()
    loaded = pickle.loads(pickle.dumps(other))
    assert torch.equal(loaded(torch.ones(2, WIDTH)), other(torch.ones(2, WIDTH)))


@pytest.mark.parametrize("form", FORMS)
def test_a_lazy_model_is_refused_when_it_is_called_and_not_before(form: str) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    call = FORMS[form](model)
    with fake_world(2), pytest.raises(ConfigError, match="no shape yet"):
        call(torch.ones(2, WIDTH))


@pytest.mark.parametrize("make", [Stack, lambda: nn.Linear(WIDTH, WIDTH)], ids=["class", "of-torch"])
def test_nothing_of_the_first_call_in_place_is_kept(make: Callable[[], nn.Module]) -> None:
    with fake_world(2), torch.no_grad():
        model: nn.Module = make()
        batch = torch.ones(2, WIDTH)
        _in_place(model)
        model(batch)
        kept: list[weakref.ref[Any]] = [weakref.ref(batch), weakref.ref(model)]
        del model, batch
        gc.collect()  # what `module.compile` makes refers to the module
        assert [reference() for reference in kept] == [None, None]


def test_a_first_call_in_place_whose_forward_fails() -> None:
    with fake_world(2):
        model = Stack()
        _in_place(model)
        with pytest.raises(Exception, match="shape"):
            model(torch.ones(2, WIDTH + 1))
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
