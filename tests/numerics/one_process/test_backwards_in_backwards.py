"""Backward passes that run others, and such that fail: no gradient is lost, and none counts twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import no_sync
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess, loss_of


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
