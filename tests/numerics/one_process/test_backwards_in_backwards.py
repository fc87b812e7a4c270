"""Hooks on saved tensors, and backward passes that run others or fail: no gradient is lost, and none counts twice."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import fully_shard, no_sync, units
from tests import long
from tests.fake_world import fake_world
from tests.models.outlines import Small
from tests.numerics.one_process.measure import OneOfTwo
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess, compare_gradients, compile_eagerly, loss_of


class _Around(nn.Module):
    """One unit has parameters before, inside of and after what is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.tanh(self.middle(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self._inner, torch.tanh(self.first(x)), use_reentrant=True))


class _Blocks(nn.Module):
    """The root's unit has parameters on both sides of blocks that are units."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(6))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.pos
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.norm(x)


class _Whole(_Blocks):
    """All parameters are read in a backward that another one calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class _Fails(nn.Module):
    """Its backward fails between the parameters of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.fails:
            hidden.register_hook(_fail)
        return self.second(hidden)


def _fail(_: torch.Tensor) -> NoReturn:
    raise ValueError("on purpose")


def _pair(make: Callable[[], nn.Module]) -> WithOneProcess:
    """Inputs require gradients, which reentrant checkpoints need."""
    return WithOneProcess(make, loss=lambda call, x: loss_of(call(x.clone().requires_grad_()).sin()), twice=False)


@long.parametrize("make", [_Around, _Blocks, _Whole], always=[_Around, _Blocks])
@on_ranks()
def test_a_unit_gets_all_gradients_where_a_backward_runs_inside_of_another(make: type[nn.Module]) -> None:
    """And accumulated ones count once."""
    pair = _pair(make)
    with no_sync(pair.model) if make is not _Around else contextlib.nullcontext():
        pair.backward()
    assert make is _Around or all(parameter.grad is None for parameter in pair.model.parameters())
    pair.backward()
    pair.compare_gradients()


@on_ranks()
def test_a_hook_that_fails_keeps_no_gradient_from_the_other_parameters_of_its_unit() -> None:
    pair = _pair(_Fails)
    handle = pair.model.second.weight.register_post_accumulate_grad_hook(_fail)
    with pytest.raises(ValueError, match="on purpose"):
        pair.losses()[0].backward()
    handle.remove()
    assert pair.model.second.bias.grad is not None


Hooks = Callable[[], saved_tensors_hooks]


def _copying() -> saved_tensors_hooks:
    return saved_tensors_hooks(torch.clone, lambda t: t)


def _changed(saved: torch.Tensor) -> torch.Tensor:
    return saved * (1 + 1e-6)


def _loss(hooks: Hooks, call: Any, batch: torch.Tensor) -> torch.Tensor:
    with hooks():
        return loss_of(call(batch))


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, eps=1e-3, weight_decay=0.5)


@on_ranks()
def test_parameters_that_are_left_out_have_no_gradient() -> None:
    for hooks in (_copying, save_on_cpu):
        pair = WithOneProcess(OneOfTwo, optimizer=_adamw, loss=functools.partial(_loss, hooks))
        assert len(units(pair.model)) == 1
        for chosen in ("first", "second", "first"):
            pair.change(lambda model: setattr(model, "chosen", chosen))  # noqa: B023  runs at once
            pair.train(steps=1)


@on_ranks()
def test_hooks_do_not_see_sharded_parameters() -> None:
    packed: list[int] = []

    def note(saved: torch.Tensor) -> torch.Tensor:
        packed.append(saved.data_ptr())
        return _changed(saved)

    pair = WithOneProcess(Small, loss=functools.partial(_loss, lambda: saved_tensors_hooks(note, lambda t: t)))
    pair.train(steps=1)
    assert packed, "activations"
    assert not {group.flat.data_ptr() for unit in units(pair.model) for group in unit.groups}.intersection(packed)


class _Attends(nn.Module):
    """An attention that is checkpointed: torch saves the state of its random numbers for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self._attend, x, use_reentrant=False))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


def test_gradients_accumulate_where_a_state_of_random_numbers_is_saved() -> None:
    torch.manual_seed(0)
    with fake_world(1):
        model = _Attends()
        reference = copy.deepcopy(model)
        compiled = compile_eagerly(fully_shard(model))
        for batch in torch.randn(2, 3, 4, 6):
            with fsdp_compile.no_sync(model):
                compiled(batch).square().mean().backward()
            reference(batch).square().mean().backward()
        batch = torch.randn(3, 4, 6)
        compiled(batch).square().mean().backward()
        reference(batch).square().mean().backward()
        compare_gradients(model, reference, (1.3e-6, 1e-5))
