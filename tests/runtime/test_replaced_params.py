"""Optimizers made before the first call go on working: without state, with state, in groups, with a schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_compile.runtime.replaced_params import ReplacedParameter
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard
from tests import long
from tests.beside import Beside, Run, close, compile_eagerly, loss_of
from tests.models.outlines import Small
from tests.ranks import run_ranks

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
}


def _steps_before(pair: Beside, count: int) -> None:
    """Steps of both models in plain PyTorch, on the same batch on every rank."""
    for step in range(count):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + step))
        for model, optimizer in zip(pair.both(), pair.optimizers[0], strict=True):
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()


def _check_optimizer(kind: str, before: int, how: Run) -> None:
    pair = Beside(Small, Run.UNSHARDED if before else how)
    pair.optimize(OPTIMIZERS[kind])
    _steps_before(pair, before)
    if before and how is Run.EAGER:
        fully_shard(pair.model)
    elif before:  # once a model is compiled, its gradients outside of compiled calls are refused
        pair.compiled = compile_eagerly(pair.model)
    held = [p for group in pair.optimizers[0][0].param_groups for p in group["params"]]
    for _ in range(3):
        pair.step()
    _assert_sharded_state(pair.optimizers[0][0], list(pair.model.parameters()))
    if how is Run.PLAIN:
        assert all(isinstance(p, ReplacedParameter) for p in held)


def _assert_sharded_state(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, parameters, strict=True))
    assert set(optimizer.state) <= set(parameters)
    for parameter, state in optimizer.state.items():
        shaped = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
        for value in shaped:
            assert isinstance(value, DTensor)
            assert value.to_local().shape == parameter.to_local().shape  # type: ignore[attr-defined]


@long.parametrize("kind", OPTIMIZERS, always=["adamw"])
@pytest.mark.parametrize("before", [0, 2])
def test_an_optimizer_made_before_sharding(kind: str, before: int) -> None:
    run_ranks(_check_optimizer, kind, before, Run.EAGER)


@pytest.mark.core
@long.parametrize("kind", ["adamw", "sgd-momentum"], always=["adamw"])
def test_an_optimizer_with_state_made_before_the_first_compiled_call(kind: str) -> None:
    run_ranks(_check_optimizer, kind, 2, Run.PLAIN)


def _check_groups_and_schedule() -> None:
    pair = Beside(Small, Run.PLAIN)

    def make(parameters: Any) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() >= 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [], "lr": 1e-3, "mine": "kept"}]
        return torch.optim.AdamW(groups, lr=1e-2)

    def others(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in parameters if p.dim() < 2], lr=1e-1)

    pair.optimize(make)
    pair.optimize(others)
    for mine, theirs in pair.optimizers[:1]:
        mine.add_param_group({"params": [], "lr": 0.0})
        theirs.add_param_group({"params": [], "lr": 0.0})
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for p in pair.optimizers for o in p]
    groups = pair.optimizers[0][0].param_groups
    for _ in range(3):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    mine, theirs = pair.optimizers[0]
    assert mine.param_groups is groups
    assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert [g["weight_decay"] for g in mine.param_groups] == [g["weight_decay"] for g in theirs.param_groups]
    assert mine.param_groups[1]["mine"] == "kept"
    assert all(isinstance(p, DTensor) for p in mine.param_groups[0]["params"])


def test_groups_several_optimizers_and_a_schedule() -> None:
    run_ranks(_check_groups_and_schedule)


def _check_state_round_trip() -> None:
    """The state dict of a sharded optimizer loads into another one, and both go on alike."""
    pair = Beside(Small, Run.EAGER)
    pair.optimize(OPTIMIZERS["adamw"])
    pair.step()
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers[0]]
    pair.optimizers.clear()
    pair.optimize(OPTIMIZERS["adamw"])
    for optimizer, state in zip(pair.optimizers[0], saved, strict=True):
        optimizer.load_state_dict(state)
    pair.step()


def test_optimizer_state_dicts_load_again() -> None:
    run_ranks(_check_state_round_trip)


def _factored(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)


def _check_refused_state(make: Make) -> str:
    model = Small()
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(torch.ones(2, 6)))
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    optimizer.zero_grad()
    fully_shard(model)
    before = optimizer.state_dict()
    for _ in range(2):  # the first refusal changes nothing
        with pytest.raises(ConfigError) as caught:
            optimizer.step(closure)  # type: ignore[arg-type]
        assert optimizer.state_dict() == before
    return str(caught.value)


def _quasi_newton(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=3)


@long.parametrize(("make", "state"), [(_factored, "row_var"), (_quasi_newton, "al")], always=[(_factored, "row_var")])
def test_state_that_cannot_be_sharded_is_refused_by_name(make: Make, state: str) -> None:
    for message in run_ranks(_check_refused_state, make):
        assert f"state {state!r}" in message
        assert "where:" in message
        assert "make the optimizer after the first call" in message


def _check_old_lists() -> None:
    """A list of parameters that was taken before the first call: its gradients are the sharded ones."""
    pair = Beside(Small, Run.PLAIN)
    old, theirs = list(pair.model.parameters()), list(pair.reference.parameters())
    pair.optimize(OPTIMIZERS["sgd"])
    pair.backward()
    for moved, now in zip(old, pair.model.parameters(), strict=True):
        assert isinstance(moved, ReplacedParameter)
        assert moved.grad is now.grad is not None
    norm = nn.utils.clip_grad_norm_(old, 0.01)
    assert isinstance(norm, DTensor)
    close(norm.full_tensor(), nn.utils.clip_grad_norm_(theirs, 0.01), "norm")
    for optimizer in pair.optimizers[0]:
        optimizer.step()
    pair.compare()
    for moved in old:
        moved.grad = None
    assert all(p.grad is None for p in pair.model.parameters())
    for optimizer in pair.optimizers[0]:
        optimizer.zero_grad()
    pair.step()


@pytest.mark.long
@pytest.mark.core
def test_clipping_over_an_old_list_of_parameters() -> None:
    run_ranks(_check_old_lists)


def _check_old_parameters_are_refused() -> None:
    model = Small()
    old = model.up.weight
    fully_shard(model)
    assert "ReplacedParameter" in type(old).__name__
    assert old.requires_grad
    assert old.is_leaf
    assert old in {old}
    for compute in (
        lambda: old + 1,
        old.sum,
        lambda: torch.mm(old, old),
        old.numel,
        lambda: old[0],
    ):
        with pytest.raises(ConfigError, match="was sharded since you took it") as caught:
            compute()
        assert "up.weight" in str(caught.value)
        assert "model.parameters()" in str(caught.value)
    late = torch.optim.SGD([old], lr=1.0)
    model(torch.ones(2, 6)).sum().backward()
    before = model.up.weight.to_local().clone()  # type: ignore[attr-defined]
    late.step()
    assert late.param_groups[0]["params"][0] is model.up.weight, "an optimizer follows, whenever it was made"
    assert not torch.equal(before, model.up.weight.to_local())


def test_computing_with_an_old_parameter_is_refused_readably() -> None:
    run_ranks(_check_old_parameters_are_refused)


Change = Callable[[list[nn.Parameter]], object]


def _clip(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.clamp_(-0.05, 0.05)


def _freeze(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters[:2]:
        parameter.requires_grad = False


def _mark(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.tag = 2.0  # type: ignore[attr-defined]
        assert parameter.tag == 2.0  # type: ignore[attr-defined]


def _shapes(parameters: list[nn.Parameter]) -> list[tuple[Any, ...]]:
    return [(p.ndim, p.shape, p.dtype, p.requires_grad, getattr(p, "tag", None)) for p in parameters]


class _Tagged(Small):
    """Reads a mark of a parameter in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self.scale, "tag", 1.0)


def _check_changed(change: Change, how: Run) -> None:
    """A list that was taken before, and changed before the first step and after it."""
    pair = Beside(_Tagged, Run.UNSHARDED)
    old, theirs = (list(model.parameters()) for model in pair.both())
    if how is Run.EAGER:
        fully_shard(pair.model)
    else:
        pair.compiled = compile_eagerly(pair.model)
    pair.optimize(OPTIMIZERS["sgd"])
    pair.backward()
    for _ in range(2):
        change(old)
        change(theirs)
        assert _shapes(old) == _shapes(theirs)
        pair.compare()
        pair.step()
    assert isinstance(old[0], ReplacedParameter)


def _check_all_changes() -> None:
    for how in (Run.PLAIN, Run.EAGER):
        for change in (_clip, _freeze, _mark):
            _check_changed(change, how)
    model = Small()
    old = model.up.bias
    fully_shard(model)
    with pytest.raises(ConfigError, match=r"(?s)was sharded since you took it, and `\.data = \.\.\.` needs.*up\.bias"):
        old.data = torch.zeros(7)


def test_changes_through_an_old_list_of_parameters_are_those_of_the_sharded_ones() -> None:
    run_ranks(_check_all_changes)
