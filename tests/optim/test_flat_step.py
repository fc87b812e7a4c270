"""`flat_step`: the bits of torch's optimizers on plain tensors, one parameter after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fsdp_compile.runtime import gradients
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, flat_step, fully_shard, units
from fsdp_compile._torch.tensors import views_of
from fsdp_compile.optim.flat_step import ELEMENTWISE
from tests.fake_world import fake_world

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
}
Made = tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter], torch.optim.Optimizer]


class Small(nn.Module):
    """Rows that do not divide, a 0-d parameter, a frozen one, and one that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.whole = nn.Parameter(torch.randn(3))


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups that share parameter groups: biases and scale without decay, weights with it."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _make(optimizer: Callable[..., torch.optim.Optimizer], *, in_groups: bool = True, **settings: Any) -> Made:
    model = Small()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params={model.whole})
    parameters = list(model.parameters())
    plain = [nn.Parameter(_local(p).detach().clone(), requires_grad=p.requires_grad) for p in parameters]
    split = _groups if in_groups else list
    mine = flat_step(optimizer(split(parameters), **settings))
    return model, mine, plain, optimizer(_split_alike(mine, parameters, plain), **settings)


def _split_alike(
    mine: torch.optim.Optimizer, parameters: list[nn.Parameter], plain: list[nn.Parameter]
) -> list[dict[str, Any]]:
    twin = dict(zip(parameters, plain, strict=True))
    return [{**group, "params": [twin[p] for p in group["params"]]} for group in mine.param_groups]


def _give_gradients(model: nn.Module, plain: list[nn.Parameter], step: int, missing: int | None = None) -> None:
    """The same gradients to both: on flat buffers, as a backward accumulates them, and one by one."""
    torch.manual_seed(step)
    for unit in units(model):
        for flat in unit.param_groups:
            buffer = torch.zeros_like(flat.flat_param.detach())
            for slot in flat.params:
                views_of(buffer, [slot.place])[0].normal_()
            if flat.flat_param.requires_grad:
                skipped = (
                    {flat.params[missing].spec.offset} if missing is not None and len(flat.params) > missing else set()
                )
                gradients.accumulate_sharded_grads(flat, buffer, {s.spec.offset for s in flat.params} - skipped)
    assert isinstance(model.whole, nn.Parameter)
    model.whole.grad = torch.randn(3)
    for p, q in zip(model.parameters(), plain, strict=True):
        q.grad = None if p.grad is None else _local(p.grad).clone()


def _assert_alike(model: nn.Module, plain: list[nn.Parameter]) -> None:
    for (name, p), q in zip(model.named_parameters(), plain, strict=True):
        assert torch.equal(_local(p), q), name
    for flat in (flat for unit in units(model) for flat in unit.param_groups):
        rest = flat.flat_param.detach().clone()
        for slot in flat.params:
            views_of(rest, [slot.place])[0].zero_()
        assert not rest.any(), "padding was updated"


def _train(made: Made, steps: range, missing: int | None = None) -> None:
    model, mine, plain, theirs = made
    for step in steps:
        _give_gradients(model, plain, step, missing)
        mine.step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
        _assert_alike(model, plain)


@pytest.mark.core
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("rank", [0, 3])
def test_the_bits_are_those_of_plain_tensors(kind: Any, foreach: bool, rank: int) -> None:  # noqa: FBT001
    settings = SETTINGS.get(kind.__name__, {"lr": 1e-2})
    with fake_world(4, rank=rank):
        _train(_make(kind, in_groups=kind is not torch.optim.Rprop, foreach=foreach, **settings), range(STEPS))


def test_fewer_tensors_than_parameters_are_updated() -> None:
    with fake_world(2):
        model, mine, plain, _ = _make(torch.optim.AdamW, in_groups=False)
        _give_gradients(model, plain, 0)
        seen: list[int] = []
        mine.register_step_pre_hook(lambda o, *_: seen.append(sum(len(g["params"]) for g in o.param_groups)))
        mine.step()
        assert seen == [len(list(model.layers)) + 2]  # type: ignore[arg-type]  # and the scale and the whole one


def test_missing_gradients_leave_their_parameters_alone() -> None:
    with fake_world(2):
        made = _make(torch.optim.AdamW, in_groups=False)
        _train(made, range(2))
        _train(made, range(2, 4), missing=1)  # one bias or weight of each layer misses two steps
        _train(made, range(4, 6))


@pytest.mark.core
def test_a_unit_that_is_laid_out_anew_is_updated_once() -> None:
    ends = []
    for change in (flat_step, lambda optimizer: optimizer):
        with fake_world(1):
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(6, 5))
            optimizer = change(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for number in range(5):
                if number == 2:
                    model.bias.requires_grad_(False)  # noqa: FBT003
                    optimizer.zero_grad()
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append([_local(p).detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_gradients_of_the_users_own_are_taken_one_by_one() -> None:
    with fake_world(2):
        model, mine, plain, theirs = _make(torch.optim.AdamW, in_groups=False)
        _give_gradients(model, plain, 0)
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad * 1  # elsewhere in memory
        mine.step()
        theirs.step()
        _assert_alike(model, plain)
        mine.zero_grad()
        _train((model, mine, plain, theirs), range(1, 3))


@pytest.mark.core
def test_state_is_per_parameter_and_loads_again() -> None:
    with fake_world(2):
        model, mine, plain, theirs = _make(torch.optim.AdamW)
        _train((model, mine, plain, theirs), range(2))
        for p, q in zip(model.parameters(), plain, strict=True):
            assert (p in mine.state) == (q in theirs.state)
            for key, value in theirs.state.get(q, {}).items():
                shaped = isinstance(p, DTensor) and key != "step"
                assert isinstance(mine.state[p][key], DTensor) == shaped
                assert torch.equal(_local(mine.state[p][key]), value)
        saved = copy.deepcopy(mine.state_dict())
        again = flat_step(torch.optim.AdamW(_groups(list(model.parameters()))))
        again.load_state_dict(saved)
        _train((model, again, plain, theirs), range(2, 4))


class _Momentum(torch.optim.Optimizer):
    """Of another library: its momentum has the name of a number in torch's ASGD."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                mean = self.state[parameter].setdefault("mu", torch.zeros_like(parameter))
                parameter.sub_(mean.mul_(0.9).add_(parameter.grad), alpha=self.param_groups[0]["lr"])


def test_state_of_a_parameters_shape_is_its_part_under_any_name() -> None:
    with fake_world(2):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(6, 2))  # one element of the bias on each rank
        plain = [nn.Parameter(_local(p).detach().clone()) for p in model.parameters()]
        mine, theirs = flat_step(_Momentum(model.parameters()), elementwise=True), _Momentum(plain)
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
            assert torch.equal(_local(held), theirs.state[q]["mu"])
            assert torch.equal(_local(p), q)


@pytest.mark.core
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam], ids=lambda kind: kind.__name__)
def test_each_parameter_has_a_count_of_steps_of_its_own(kind: Any) -> None:
    """One count for all would grow by one for each parameter in an optimizer that goes on without `flat_step`."""
    with fake_world(2):
        model, mine, plain, theirs = _make(kind, in_groups=False)
        _train((model, mine, plain, theirs), range(2))
        again = kind(model.parameters())
        again.load_state_dict(copy.deepcopy(mine.state_dict()))
        _train((model, again, plain, theirs), range(2, 4))
        for p, q in zip(model.parameters(), plain, strict=True):
            assert again.state.get(p, {}).get("step") == theirs.state.get(q, {}).get("step")


@pytest.mark.parametrize("in_place", [False, True])
def test_values_that_users_put_into_the_state_count(in_place: bool) -> None:  # noqa: FBT001
    with fake_world(2):
        made = _make(torch.optim.AdamW, in_groups=False)
        _train(made, range(2))
        for optimizer in (made[1], made[3]):
            for state in optimizer.state.values():
                for key, value in state.items():
                    state[key] = value.zero_() if in_place else torch.zeros_like(value)
        _train(made, range(2, 4))


def test_schedules_and_closures_work() -> None:
    with fake_world(2):
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
            _assert_alike(model, plain)


def test_an_error_in_the_step_leaves_the_optimizer_as_it_was() -> None:
    with fake_world(2):
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
