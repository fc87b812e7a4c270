"""Plain parameters that optimizers, schedules and lists hold from before the first compiled call has sharded them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import ConfigError
from fsdp_compile.fsdp2.stale import StaleParameter
from fsdp_compile.optim.whole_step import whole_step
from tests import long
from tests.fsdp2.test_plain import Model, pair_of
from tests.models.outlines import Small
from tests.ranks import on_ranks
from tests.two_sides import Make, Run, WithOneProcess, adamw, compile_eagerly, local, loss_of, sgd

OPTIMIZERS: dict[str, Make] = {
    "adamw": adamw,
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def _plain_steps(pair: WithOneProcess, count: int) -> None:
    """Steps of both before the model is compiled, on the same batch on every rank."""
    for step in range(count):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + step))
        for model in pair:
            loss_of(model(x)).backward()
        pair.update()


CASES = [*((kind, 0) for kind in OPTIMIZERS), ("adamw", 2), ("sgd-momentum", 2)]
"""Which optimizer is made before, and how many steps it makes before, which give it state."""


@long.parametrize(("kind", "before"), CASES, always=[("adam-amsgrad", 0), ("sgd-momentum", 2)])
@on_ranks()
def test_an_optimizer_made_before_follows(kind: str, before: int) -> None:
    pair = pair_of(optimizer=OPTIMIZERS[kind])
    _plain_steps(pair, before)
    pair.call = compile_eagerly(pair.model)
    held = list(pair.model.parameters())
    mine = pair.optimizers[0][0]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in pair.optimizers[0]]
    pair.backward()
    # At once, and not in the first step only.
    assert all(a is b for a, b in zip(mine.param_groups[0]["params"], pair.model.parameters(), strict=True))
    assert all(type(p) is StaleParameter for p in held)
    pair.update()
    for _ in range(2):
        for schedule in schedules:
            schedule.step()
        pair.train(steps=1)
    assert set(mine.state) == set(pair.model.parameters())
    for parameter, state in mine.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                assert isinstance(value, DTensor)
                assert value.to_local().shape == local(parameter).shape


@on_ranks()
def test_an_optimizer_that_sees_whole_parameters_keeps_state_of_other_shapes() -> None:
    """Adafactor has rows and columns of each matrix, which are on every rank until the next step."""
    pair = pair_of(optimizer=lambda p: whole_step(torch.optim.Adafactor(p, lr=1e-2)))
    _plain_steps(pair, 2)
    pair.call = compile_eagerly(pair.model)
    pair.train()


@on_ranks()
def test_lists_from_before() -> None:
    pair = pair_of()
    held = list(pair.model.parameters())
    head: Any = pair.model.get_parameter("head.weight")
    head.decay = 0.5
    pair.call = compile_eagerly(pair.model)
    pair.backward()
    now: Any = pair.model.get_parameter("head.weight")
    assert now is not head
    assert type(head) is StaleParameter
    # Attributes are those of the sharded parameter.
    assert head.grad is now.grad
    assert head.grad is not None
    assert (head.shape, head.dtype, head.dim(), head.numel()) == ((3, 6), torch.float32, 2, 18)
    assert head.requires_grad
    assert head.decay == now.decay == 0.5
    assert isinstance(head.data, DTensor)
    assert copy.deepcopy(head).shape == head.shape
    assert "StaleParameter" in repr(head)
    norm: Any = nn.utils.clip_grad_norm_(held, 0.1)
    expected = nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1)
    torch.testing.assert_close(norm.full_tensor(), expected)
    pair.update()
    pair.compare()
    # Gradients are dropped, and parameters frozen, by the list.
    pair.backward()
    for parameter in held:
        parameter.grad = None
    assert all(p.grad is None for p in pair.model.parameters())
    head.requires_grad = False
    assert not now.requires_grad
    head.requires_grad = True
    # An optimizer that is made of the list.
    late = sgd(held)
    pair.optimizers = [(late, sgd(list(pair.reference.parameters())))]
    pair.reference.zero_grad()
    pair.train()
    assert all(isinstance(p, DTensor) for p in late.param_groups[0]["params"])

    for compute in (lambda: head + 1, head.detach, lambda: head.add_(1), lambda: torch.stack([head])):
        with pytest.raises(ConfigError, match=r"(?s)sharded since you took it.*model.parameters\(\) again"):
            compute()
    with pytest.raises(ConfigError, match="data = "):
        head.data = torch.zeros(3, 6)


@long.parametrize("kind", ["adamw", "adagrad"], always=["adamw"])
@on_ranks()
def test_state_that_is_loaded_between_sharding_and_the_first_step(kind: str) -> None:
    first = pair_of(optimizer=OPTIMIZERS[kind])
    first.call = compile_eagerly(first.model)
    first.train()
    options = dcp_state.StateDictOptions(full_state_dict=True)
    own = copy.deepcopy(first.optimizers[0][0].state_dict())
    full = dcp_state.get_optimizer_state_dict(first.model, first.optimizers[0][0], options=options)
    values = dcp_state.get_model_state_dict(first.model, options=options)

    def resumed(load: Any) -> None:
        pair = pair_of(optimizer=OPTIMIZERS[kind])
        held = list(pair.model.parameters())
        mine, theirs = pair.optimizers[0]
        pair.steps = first.steps
        pair.model.load_state_dict(values)
        pair.reference.load_state_dict(values)
        theirs.load_state_dict(copy.deepcopy(first.optimizers[0][1].state_dict()))
        pair.call = compile_eagerly(pair.model)
        with torch.no_grad():
            pair.call(torch.randn(2, 6))
        assert len(mine.state_dict()["param_groups"][0]["params"]) == len(held)
        mine.zero_grad()
        load(pair)
        pair.train()

    resumed(lambda pair: dcp_state.set_optimizer_state_dict(pair.model, pair.optimizers[0][0], full, options=options))
    resumed(lambda pair: pair.optimizers[0][0].load_state_dict(own))


@pytest.mark.long
@on_ranks()
def test_a_grad_scaler() -> None:
    pair = pair_of(optimizer=OPTIMIZERS["sgd-momentum"])
    pair.call = compile_eagerly(pair.model)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for _ in range(2):
        for scaler, optimizer, loss in zip(scalers, pair.optimizers[0], pair.losses(), strict=True):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.compare()


@on_ranks()
def test_state_that_cannot_be_sharded_is_refused_by_name() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.head.weight]["rows"] = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"holds state 'rows'[\s\S]*whole_step\(optimizer\) before that; else make"):
        compile_eagerly(model)(torch.randn(2, 6))


@on_ranks()
def test_a_graph_from_before_keeps_its_values() -> None:
    pair = pair_of()
    x = torch.randn(4, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    loss, expected = pair.model(x).square().mean(), pair.reference(y).square().mean()
    with torch.no_grad():
        compile_eagerly(pair.model)(x)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(expected, y))


@on_ranks()
def test_groups_several_optimizers_and_a_schedule() -> None:
    pair = WithOneProcess(Small, Run.PLAIN)

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
        pair.train(steps=1)
        for scheduler in schedulers:
            scheduler.step()
    mine, theirs = pair.optimizers[0]
    assert mine.param_groups is groups
    assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert [g["weight_decay"] for g in mine.param_groups] == [g["weight_decay"] for g in theirs.param_groups]
    assert mine.param_groups[1]["mine"] == "kept"
    assert all(isinstance(p, DTensor) for p in mine.param_groups[0]["params"])


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
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self.scale, "tag", 1.0)


@pytest.mark.parametrize("change", [_clip, _freeze, _mark])
@on_ranks()
def test_changes_through_an_old_list_of_parameters_are_those_of_the_sharded_ones(change: Change) -> None:
    """A list that was taken before, and changed before the first step and after it."""
    pair = WithOneProcess(_Tagged, Run.UNSHARDED, optimizer=sgd)
    old, theirs = (list(model.parameters()) for model in pair)
    pair.call = compile_eagerly(pair.model)
    pair.backward()
    for _ in range(2):
        change(old)
        change(theirs)
        assert _shapes(old) == _shapes(theirs)
        pair.compare()
        pair.train(steps=1)
    assert all(isinstance(p, StaleParameter) == bool(p.dim()) for p in old), "FSDP2 cannot split numbers: they stay"
