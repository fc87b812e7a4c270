"""`flat_step`: the bits of torch's optimizers on plain tensors, one parameter after the other."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import make_dtensor
from fsdp_compile.errors import ConfigError
from fsdp_compile.optim.flat_step import ELEMENTWISE, flat_step
from fsdp_compile.optim.whole_step import whole_step
from tests import long
from tests.fake_world import fake_world
from tests.fsdp2.models import local, put_into_one_storage, sharded, train
from tests.optim.library_optimizers import Momentum
from tests.ranks import on_ranks
from tests.two_sides import whole

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
}
Made = tuple[Any, torch.optim.Optimizer, list[nn.Parameter], torch.optim.Optimizer]


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


class Small(nn.Module):
    """Rows that do not divide, a frozen parameter, and one that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.whole = nn.Parameter(torch.randn(3))


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups that share parameter groups of FSDP2: biases without decay, weights with it."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _make(
    optimizer: Callable[..., torch.optim.Optimizer], *, in_groups: bool = True, flat: bool = True, **settings: Any
) -> Made:
    model = Small()
    for layer in model.layers:
        fully_shard(layer)
        if flat:
            put_into_one_storage(list(layer.parameters()))
    fully_shard(model, ignored_params={model.whole})
    parameters = list(model.parameters())
    plain = [nn.Parameter(local(p).detach().clone(), requires_grad=p.requires_grad) for p in parameters]
    split = _groups if in_groups else list
    mine = flat_step(optimizer(split(parameters), **settings))
    twin = dict(zip(parameters, plain, strict=True))
    groups = [{**group, "params": [twin[p] for p in group["params"]]} for group in mine.param_groups]
    return model, mine, plain, optimizer(groups, **settings)


def _give_gradients(
    model: Any, plain: list[nn.Parameter], step: int, *, in_one_buffer: bool = True, missing: tuple[str, ...] = ()
) -> None:
    """The same gradients to both: on flat buffers, or one by one."""
    torch.manual_seed(step)
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if parameter.requires_grad and not name.endswith(missing):
            gradient = torch.randn(local(parameter).shape)
            parameter.grad = make_dtensor(gradient, parameter) if isinstance(parameter, DTensor) else gradient
    for layer in model.layers:
        given = [p.grad for p in layer.parameters() if p.grad is not None]
        if in_one_buffer and given:
            put_into_one_storage(given)
    for p, q in zip(model.parameters(), plain, strict=True):
        q.grad = None if p.grad is None else local(p.grad).clone()


def _assert_same(model: nn.Module, plain: list[nn.Parameter]) -> None:
    for (name, p), q in zip(model.named_parameters(), plain, strict=True):
        assert torch.equal(local(p), q), name


def _train(given: Made, steps: range, **gradients: Any) -> None:
    model, mine, plain, theirs = given
    for step in steps:
        _give_gradients(model, plain, step, **gradients)
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
        _assert_same(model, plain)


@pytest.mark.core
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rank", [0, 3])
def test_the_bits_are_those_of_plain_tensors(kind: Any, foreach: bool, flat: bool, rank: int) -> None:  # noqa: FBT001
    settings = SETTINGS.get(kind.__name__, {"lr": 1e-2})
    in_groups = kind is not torch.optim.Rprop
    with fake_world(4, rank=rank):
        _train(_make(kind, in_groups=in_groups, flat=flat, foreach=foreach, **settings), range(STEPS))


@pytest.mark.parametrize("in_one_buffer", [False, True])
@pytest.mark.parametrize(("flat", "count"), [(True, 3 + 1), (False, 6 + 1)])
@pytest.mark.usefixtures("world")
def test_parameters_of_one_memory_are_updated_as_one_tensor(*, flat: bool, count: int, in_one_buffer: bool) -> None:
    model, mine, plain, theirs = _make(torch.optim.AdamW, in_groups=False, flat=flat)
    _give_gradients(model, plain, 0, in_one_buffer=in_one_buffer)
    memory = {local(layer.weight.grad).data_ptr() for layer in model.layers}
    seen: list[tuple[int, bool]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = optimizer.param_groups[0]["params"]
        assert not any(isinstance(p, DTensor) for p in params)
        seen.append((len(params), {p.grad.data_ptr() for p in params} >= memory))

    mine.register_step_pre_hook(look)
    mine.step()
    theirs.step()
    _assert_same(model, plain)
    assert seen == [(count, in_one_buffer or not flat)], "gradients are copied only if they have gaps"


def _move(given: Made) -> None:
    for layer in given[0].layers:
        put_into_one_storage(list(layer.parameters()))


def _reset(given: Made, *, in_place: bool) -> None:
    for optimizer in (given[1], given[3]):
        for state in optimizer.state.values():
            state.update({key: value.zero_() if in_place else torch.zeros_like(value) for key, value in state.items()})


CHANGES: dict[str, tuple[Callable[[Made], None], dict[str, Any]]] = {
    "biases without gradients": (lambda _: None, {"missing": ("bias",)}),
    "gradients of the user's own": (lambda _: None, {"in_one_buffer": False}),
    "shards that are moved": (_move, {}),
    "new values in the state": (functools.partial(_reset, in_place=False), {}),
    "values in the state that are written in place": (functools.partial(_reset, in_place=True), {}),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("world")
def test_changes_between_steps_are_followed(name: str) -> None:
    change, gradients = CHANGES[name]
    given = _make(torch.optim.AdamW, in_groups=False, flat=change is not _move)
    _train(given, range(2))
    change(given)
    _train(given, range(2, 4), **gradients)
    _train(given, range(4, 6))


@pytest.mark.core
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.usefixtures("world")
def test_state_is_per_parameter_and_loads_again(*, flat: bool) -> None:
    model, mine, plain, theirs = _make(torch.optim.AdamW, flat=flat)
    _train((model, mine, plain, theirs), range(2))
    for p, q in zip(model.parameters(), plain, strict=True):
        assert (p in mine.state) == (q in theirs.state)
        for key, value in theirs.state.get(q, {}).items():
            assert isinstance(mine.state[p][key], DTensor) == (isinstance(p, DTensor) and key != "step")
            assert torch.equal(local(mine.state[p][key]), value)
    saved = copy.deepcopy(mine.state_dict())
    again = flat_step(torch.optim.AdamW(_groups(list(model.parameters()))))
    again.load_state_dict(saved)
    _train((model, again, plain, theirs), range(2, 4))


@pytest.mark.usefixtures("world")
def test_state_of_a_parameters_shape_is_its_part_under_any_name() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(6, 2))  # one element of the bias on each rank
    plain = [nn.Parameter(local(p).detach().clone()) for p in model.parameters()]
    mine, theirs = flat_step(Momentum(model.parameters()), elementwise=True), Momentum(plain)
    for _ in range(2):
        for p, q in zip(model.parameters(), plain, strict=True):
            p.grad = torch.ones_like(p)
            q.grad = torch.ones_like(q)
        mine.step()
        theirs.step()
    for p, q in zip(model.parameters(), plain, strict=True):
        held = mine.state[p]["mu"]
        assert isinstance(held, DTensor)
        assert held.shape == p.shape
        assert torch.equal(local(held), theirs.state[q]["mu"])
        assert torch.equal(local(p), q)


@pytest.mark.core
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam], ids=lambda kind: kind.__name__)
@pytest.mark.usefixtures("world")
def test_each_parameter_has_a_count_of_steps_of_its_own(kind: Any) -> None:
    """One count for all would grow by one for each parameter in an optimizer that goes on without `flat_step`."""
    model, mine, plain, theirs = _make(kind, in_groups=False)
    _train((model, mine, plain, theirs), range(2))
    again = kind(model.parameters())
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    _train((model, again, plain, theirs), range(2, 4))
    for p, q in zip(model.parameters(), plain, strict=True):
        assert again.state.get(p, {}).get("step") == theirs.state.get(q, {}).get("step")


@pytest.mark.usefixtures("world")
def test_schedules_and_closures_work() -> None:
    model, mine, plain, theirs = _make(torch.optim.SGD, lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (mine, theirs)]
    for step in range(3):

        def closure(step: int = step) -> float:
            _give_gradients(model, plain, step)
            return 7.0

        mine.zero_grad()
        assert mine.step(closure) == 7.0
        theirs.step()
        for schedule in schedules:
            schedule.step()
        _assert_same(model, plain)


@pytest.mark.parametrize("change", [flat_step, whole_step])
def test_a_schedule_may_be_made_before(change: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    change(optimizer)
    parameter.sum().backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, for steps that it does not count
        schedule.step()


@pytest.mark.usefixtures("world")
def test_an_error_in_the_step_leaves_the_optimizer_as_it_was() -> None:
    model, mine, plain, theirs = _make(torch.optim.AdamW)
    _train((model, mine, plain, theirs), range(1))
    before = [list(group["params"]) for group in mine.param_groups]
    _give_gradients(model, plain, 1)
    mine.param_groups[0]["betas"] = "wrong"
    with pytest.raises(ValueError, match="unpack"):
        mine.step()
    for old, group in zip(before, mine.param_groups, strict=True):
        assert all(p is q for p, q in zip(old, group["params"], strict=True))
    assert set(mine.state) <= set(model.parameters())


def test_optimizers_that_look_at_whole_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="Adafactor"):
        flat_step(torch.optim.Adafactor([nn.Parameter(torch.ones(2, 2))]))


@long.parametrize("compiled", [False, True], always=[True])
@long.parametrize("shape", [(2,), (2, 2)], always=[(2,)])
@on_ranks(world_size=lambda shape, **_: torch.Size(shape).numel())
def test_training_of_fsdp2_has_the_same_bits(shape: tuple[int, ...], *, compiled: bool) -> None:
    """With and without `flat_step` the same bits; compiled, what lies in one flat buffer is updated as one tensor."""
    ends, counts = [], set[int]()
    for change in (flat_step, lambda optimizer: optimizer):
        model = sharded(shape=shape)
        optimizer = change(torch.optim.AdamW(model.parameters(), lr=0.1))
        if change is flat_step:
            optimizer.register_step_pre_hook(lambda o, *_: counts.add(len(o.param_groups[0]["params"])))
        called: Any = torch.compile(model, backend="fsdp", options={"lower": "eager"}) if compiled else model
        train(called, optimizer, steps=3)
        ends.append({name: whole(p) for name, p in model.named_parameters()})
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
    if compiled:
        assert counts == {2 + 1 + 1}, "two blocks, the root's unit, and a number that is not sharded"
