"""Outputs of a compiled model that no loss uses: None, as in FSDP2, where torch.compile makes zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile.backend import fsdp
from fsdp_compile.optim.step_in_backward import step_in_backward
from tests.ranks import run_ranks


class Heads(nn.Module):
    """A trunk and two heads, each of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden)


def _sharded(units: int) -> Any:
    torch.manual_seed(0)
    model = Heads()
    for part in (model.left, model.right)[: units - 1]:
        fully_shard(part)
    return fully_shard(model)


def _loss(*outputs: torch.Tensor) -> torch.Tensor:
    return torch.stack([each.square().sum() for each in outputs]).sum()


def _input(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(dist.get_rank()))


def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _compare(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        mine, theirs = _whole(p.grad), _whole(q[1].grad)
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs)


def _one_unused(lower: str, units: int) -> None:
    model, reference = _sharded(units), _sharded(units)
    compiled = torch.compile(model, backend=fsdp, options={"lower": lower})
    optimizers = [optim.AdamW(each.parameters(), weight_decay=0.1) for each in (model, reference)]
    for used in (slice(0, 2), slice(0, 1), slice(0, 1), slice(1, 2), slice(0, 2)):
        _loss(*compiled(_input())[used]).backward()
        _loss(*reference(_input())[used]).backward()
        _compare(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_head_whose_output_is_unused_has_none(lower: str, units: int) -> None:
    run_ranks(_one_unused, lower, units)


def _used_by_one_rank() -> None:
    """FSDP2 itself waits for ever, or adds gradients of other parameters."""
    model = _sharded(3)
    torch.manual_seed(0)
    plain = Heads()
    compiled = torch.compile(model, backend=fsdp, options={"lower": "eager"})
    for right in (0, None, 1):
        model.zero_grad()
        plain.zero_grad()
        _loss(*compiled(_input())[: 2 if right in (None, dist.get_rank()) else 1]).backward()
        for rank in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
            (_loss(*plain(x)[: 2 if right in (None, rank) else 1]) / 2).backward()
        _compare(model, plain)


def test_ranks_whose_losses_use_other_outputs_agree() -> None:
    run_ranks(_used_by_one_rank)


def _of_changing_sizes() -> None:
    model, reference = _sharded(1), _sharded(1)
    compiled = torch.compile(model, backend=fsdp, options={"lower": "eager"}, dynamic=True)
    for rows in (4, 6, 10):
        model.zero_grad()
        reference.zero_grad()
        _loss(compiled(_input(rows))[0]).backward()
        _loss(reference(_input(rows))[0]).backward()
        _compare(model, reference)


def test_with_changing_sizes() -> None:
    run_ranks(_of_changing_sizes)


def _accumulated(first: slice, second: slice) -> None:
    model, reference = _sharded(1), _sharded(1)
    compiled = torch.compile(model, backend=fsdp, options={"lower": "eager"})
    for _ in range(2):  # the second step's graph has pending gradients among its inputs
        for each, call in ((model, compiled), (reference, reference)):
            each.zero_grad()
            each.set_requires_gradient_sync(False)
            _loss(*call(_input())[first]).backward()
            each.set_requires_gradient_sync(True)
            _loss(*call(_input())[second]).backward()
        _compare(model, reference)


@pytest.mark.parametrize(
    ("first", "second"), [(slice(0, 2), slice(0, 1)), (slice(0, 1), slice(0, 2)), (slice(0, 1), slice(0, 1))]
)
def test_pending_gradients_of_an_output_count_when_it_is_used_no_more(first: slice, second: slice) -> None:
    run_ranks(_accumulated, first, second)


def _updated_in_backward() -> None:
    model = _sharded(3)
    step_in_backward(optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))
    compiled = torch.compile(model, backend=fsdp, options={"lower": "eager"})
    before = [p.full_tensor().detach().clone() for p in model.parameters()]
    _loss(compiled(_input())[0]).backward()
    for (name, p), value in zip(model.named_parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), value) == name.startswith("right"), name


def test_nothing_is_updated_for_an_unused_output() -> None:
    run_ranks(_updated_in_backward)
