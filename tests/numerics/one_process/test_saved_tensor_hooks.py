"""Hooks on saved tensors and checkpoints see activations, and no sharded parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import fully_shard, units
from tests.fake_world import fake_world
from tests.models.outlines import Small
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess, compare_gradients, compile_eagerly, loss_of

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


class _Branches(nn.Module):
    """Two layers in one unit, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.chosen = "left"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if self.chosen == "left" else self.right(x)


@on_ranks()
def test_parameters_that_are_left_out_have_no_gradient() -> None:
    for hooks in (_copying, save_on_cpu):
        pair = WithOneProcess(_Branches, optimizer=_adamw, loss=functools.partial(_loss, hooks))
        assert len(units(pair.model)) == 1
        for chosen in ("left", "right", "left"):
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
