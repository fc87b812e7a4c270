"""Backward passes that run others, and such that fail: no gradient is lost, and none counts twice."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard, no_sync
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import close, compile_eagerly


class _Around(nn.Module):
    """One unit has parameters before, inside of and after what is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return torch.tanh(self.middle(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(checkpoint(self._inner, torch.tanh(self.first(x)), use_reentrant=True))
        return out


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
        out: torch.Tensor = self.norm(x)
        return out


class _Whole(nn.Module):
    """All parameters are read in a backward that another one calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _Blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=True)
        return out


class _Fails(nn.Module):
    """Its backward fails between the parameters of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fails = nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.fails:
            hidden.register_hook(_fail)
        out: torch.Tensor = self.second(hidden)
        return out


def _fail(_: torch.Tensor) -> NoReturn:
    raise ValueError("on purpose")


def _microbatches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        batch = torch.randn(4, 6, generator=generator).requires_grad_()
        yield batch, batch.detach().chunk(dist.get_world_size())[dist.get_rank()].requires_grad_()


def _backward(called: Any, batch: torch.Tensor) -> None:
    called(batch).sin().square().mean().backward()


def _compare(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor), name
        assert theirs.grad is not None
        close(ours.grad.full_tensor(), theirs.grad, name)


@on_ranks()
def test_a_unit_gets_all_gradients_where_a_backward_runs_inside_of_another() -> None:
    model, reference = _Around(), _Around()
    reference.load_state_dict(model.state_dict())
    fully_shard(model)
    called = compile_eagerly(model)
    for batch, share in _microbatches(2):
        _backward(called, share)
        _backward(reference, batch)
    _compare(model, reference)


@long.parametrize("make", [_Blocks, _Whole], always=[_Blocks])
@on_ranks()
def test_accumulated_gradients_count_once_where_a_backward_runs_inside_of_another(make: type[nn.Module]) -> None:
    model = make()
    reference = copy.deepcopy(model)
    fully_shard(model)
    (first, my_first), (second, my_second) = _microbatches(2)
    called = compile_eagerly(model)
    with no_sync(model):
        _backward(called, my_first)
    assert all(parameter.grad is None for parameter in model.parameters())
    _backward(called, my_second)
    for batch in (first, second):
        _backward(reference, batch)
    _compare(model, reference)


@on_ranks()
def test_a_hook_that_fails_keeps_no_gradient_from_the_other_parameters_of_its_unit() -> None:
    model = _Fails()
    fully_shard(model)
    compiled = compile_eagerly(model)
    handle = model.second.weight.register_post_accumulate_grad_hook(_fail)
    ((_, share),) = _microbatches(1)
    with pytest.raises(ValueError, match="on purpose"):
        _backward(compiled, share)
    handle.remove()
    assert model.second.bias.grad is not None
