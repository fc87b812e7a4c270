"""Optimizer state that was saved by one rank or in full, that of 0-d parameters, and optimizers that are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, UnsupportedModelError, flat_step, fully_shard, step_in_backward
from tests import long
from tests.beside import compile_eagerly
from tests.ranks import run_ranks

STEPPERS: dict[str, Callable[[optim.Optimizer], object]] = {
    "own": lambda optimizer: optimizer,
    "flat": flat_step,
    "in backward": lambda optimizer: step_in_backward(flat_step(optimizer)),
}


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = _Scaled()
    reference = copy.deepcopy(model)
    return fully_shard(model), reference


def _adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.05)


def _batch() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def _train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(_batch()).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def _assert_equal(model: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor(), theirs, msg=name)


def _check_saved_by_rank_0(stepper: str) -> None:
    model, _ = _pair()
    optimizer = _adamw(model)
    _train(model, optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    box = [file.getvalue()]
    dist.broadcast_object_list(box, 0)
    resumed = _adamw(model)
    resumed.load_state_dict(torch.load(io.BytesIO(box[0]), weights_only=False))
    STEPPERS[stepper](resumed)
    before = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if dist.get_rank() == 0:
        return
    with pytest.raises(ConfigError, match=r"saved by another rank(.|\n)*get_optimizer_state_dict"):
        resumed.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.to_local(), value)  # type: ignore[attr-defined]


@long.parametrize("stepper", ["own", "flat"], always=["flat"])
def test_state_that_rank_0_alone_has_saved_is_refused_on_others(stepper: str) -> None:
    run_ranks(_check_saved_by_rank_0, stepper)


def _check_full(stepper: str) -> None:
    model, reference = _pair()
    theirs = _adamw(reference)
    _train(reference, theirs)
    optimizer = _adamw(model)
    optimizer.load_state_dict(theirs.state_dict())
    STEPPERS[stepper](optimizer)
    with pytest.raises(ConfigError, match=r"is a full tensor(.|\n)*set_optimizer_state_dict"):
        _train(model, optimizer)


@long.parametrize("stepper", STEPPERS, always=["flat"])
def test_full_state_that_was_not_sharded_is_refused(stepper: str) -> None:
    run_ranks(_check_full, stepper)


def _check_full_dict(*, from_rank_0: bool) -> None:
    model, reference = _pair()
    optimizer, theirs = _adamw(model), _adamw(reference)
    for each, own in ((model, optimizer), (reference, theirs)):
        _train(each, own)
    options = StateDictOptions(full_state_dict=True, cpu_offload=from_rank_0)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    if from_rank_0:
        assert bool(full) == (dist.get_rank() == 0)
    resumed = _adamw(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_optimizer_state_dict(model, resumed, full, options=options)
    _train(model, resumed)
    _train(reference, theirs)
    _assert_equal(model, reference)
    state: Any = resumed.state[model.get_parameter("scale")]
    assert isinstance(state["exp_avg"], DTensor)
    assert not isinstance(state["step"], DTensor)


@long.parametrize("from_rank_0", [False, True], always=[True])
def test_a_full_dict_resumes_0_d_parameters(*, from_rank_0: bool) -> None:
    run_ranks(_check_full_dict, from_rank_0=from_rank_0)


_Make = Callable[[Any], optim.Optimizer]
REFUSED: dict[str, tuple[_Make, int, str]] = {
    "Rprop": (optim.Rprop, 8, "flat_step"),
    "fused SGD": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 8, "flat_step"),
    "fused Adagrad": (lambda p: optim.Adagrad(p, fused=True), 8, "flat_step"),
    "Adafactor": (optim.Adafactor, 8, "whole_step"),
}
RIGHT: dict[str, tuple[_Make, int]] = {
    "Rprop, flat": (lambda p: flat_step(optim.Rprop(p)), 7),
    "fused SGD, flat": (lambda p: flat_step(optim.SGD(p, lr=0.1, momentum=0.9, fused=True)), 7),
    "fused Adagrad, flat": (lambda p: flat_step(optim.Adagrad(p, fused=True)), 7),
    "fused AdamW": (lambda p: optim.AdamW(p, fused=True), 7),
    "ASGD": (optim.ASGD, 7),
}


def _mlp(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width, bias=False), nn.Tanh(), nn.Linear(width, 4, bias=False))


def _step_with_closure(model: nn.Module, optimizer: optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(_batch()).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def _check_refused(name: str) -> None:
    make, width, instead = REFUSED[name]
    model = fully_shard(_mlp(width))
    before = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModelError, match=instead):
        _step_with_closure(model, make(model.parameters()))
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), value)  # type: ignore[attr-defined]


@long.parametrize("name", REFUSED, always=["fused SGD", "Adafactor"])
def test_optimizers_that_torch_cannot_run_on_shards_are_refused_by_name(name: str) -> None:
    run_ranks(_check_refused, name)


def _check_refused_after_the_first_call() -> None:
    """The optimizer is made of a plain model, whose first compiled call shards it."""
    make, width, instead = REFUSED["Adafactor"]
    model, reference = _mlp(width), _mlp(width)
    optimizer = make(model.parameters())
    compiled = compile_eagerly(model)
    compiled(_batch()).square().mean().backward()
    with pytest.raises(UnsupportedModelError, match=instead):
        _step_with_closure(compiled, optimizer)
    _assert_equal(model, reference)


@pytest.mark.long
def test_optimizers_made_before_the_first_compiled_call_are_refused_by_name() -> None:
    run_ranks(_check_refused_after_the_first_call)


def _check_right(name: str) -> None:
    make, width = RIGHT[name]
    model, reference = fully_shard(_mlp(width)), _mlp(width)
    for each in (model, reference):
        optimizer = make(each.parameters())
        for _ in range(3):
            _step_with_closure(each, optimizer)
    _assert_equal(model, reference)


@long.parametrize("name", RIGHT, always=["fused AdamW", "ASGD"])
def test_optimizers_equal_one_process(name: str) -> None:
    run_ranks(_check_right, name)


def _check_sharded_in_a_step() -> None:
    for width in (7, 8):
        plain, reference = _mlp(width), _mlp(width)
        optimizer = optim.LBFGS(plain.parameters(), lr=0.1)
        compiled = compile_eagerly(plain)
        with pytest.raises(ConfigError, match=r"in the middle of a step(.|\n)*before the first step"):
            _step_with_closure(compiled, optimizer)
        assert not any(isinstance(parameter, DTensor) for parameter in plain.parameters())
        compiled(_batch())
        _assert_equal(plain, reference)


@pytest.mark.long
def test_a_first_call_in_a_step_of_lbfgs_is_refused() -> None:
    run_ranks(_check_sharded_in_a_step)


def _orthogonalized(gradient: torch.Tensor) -> torch.Tensor:
    """Muon's iterations in float64."""
    a, b, c = 3.4445, -4.775, 2.0315
    tall = gradient.size(0) > gradient.size(1)
    x = (gradient.T if tall else gradient).double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def _check_muon() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(32, 16)
    model = fully_shard(nn.Linear(16, 32, bias=False))
    weight: Any = model.weight
    weight.grad = torch.zeros_like(weight)
    own_rows = gradient.chunk(dist.get_world_size())[dist.get_rank()]
    weight.grad.to_local().copy_(own_rows)
    before = weight.full_tensor()
    optim.Muon(model.parameters(), lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    update = before - weight.full_tensor()
    expected = _orthogonalized(gradient) * 2**0.5  # its learning rate for 32 rows and 16 columns
    wrong = torch.cat([_orthogonalized(rows) for rows in gradient.chunk(dist.get_world_size())]) * 2**0.5
    error = (update - expected).norm() / expected.norm()
    assert error < 0.03, "it iterates in bfloat16"
    assert (wrong - expected).norm() / expected.norm() > 0.2, "each rank's rows by themselves would be seen"


def test_muon_orthogonalizes_whole_matrices() -> None:
    run_ranks(_check_muon)
