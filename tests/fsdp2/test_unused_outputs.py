"""Outputs of a compiled model that no loss uses: None, as in FSDP2, where torch.compile makes zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

from fsdp_compile.optim.step_in_backward import step_in_backward
from tests.ranks import on_ranks
from tests.two_sides import Loss, WithFsdp2, Within, compare_gradients, made


class Heads(nn.Module):
    """A trunk and two heads, each of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden)


ROUNDED = Within((1.3e-6, 1e-5), (1.3e-6, 1e-5), (1.3e-6, 1e-5))


def _pair(units: int, rows: tuple[int, ...] = (4,) * 5, **arguments: Any) -> WithFsdp2:
    def shard(model: Any) -> None:
        for part in (model.left, model.right)[: units - 1]:
            fully_shard(part)
        fully_shard(model)

    pair = WithFsdp2(Heads, shard, lambda step: _input(rows[step]), optimizer=_decayed)
    pair.within = ROUNDED
    pair.compiled(fullgraph=False, **arguments)
    return pair


def _decayed(parameters: list[nn.Parameter]) -> optim.Optimizer:
    return optim.AdamW(parameters, weight_decay=0.1)


def _loss(*outputs: torch.Tensor) -> torch.Tensor:
    return torch.stack([each.square().sum() for each in outputs]).sum()


def _of(used: slice) -> Loss:
    return lambda call, x: _loss(*call(x)[used])


def _input(rows: int = 4, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randn(rows, 6, generator=generator)


@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@on_ranks()
def test_a_head_whose_output_is_unused_has_none(lower: str, units: int) -> None:
    pair = _pair(units, lower=lower)
    for used in (slice(0, 2), slice(0, 1), slice(0, 1), slice(1, 2), slice(0, 2)):
        pair.train(steps=1, loss=_of(used))


@on_ranks()
def test_ranks_whose_losses_use_other_outputs_agree() -> None:
    """FSDP2 itself waits for ever, or adds gradients of other parameters."""
    pair = _pair(3)
    plain = made(Heads)
    for right in (0, None, 1):
        pair.model.zero_grad()
        plain.zero_grad()
        _loss(*pair.call(_input())[: 2 if right in (None, dist.get_rank()) else 1]).backward()
        for rank in range(2):
            (_loss(*plain(_input(rank=rank))[: 2 if right in (None, rank) else 1]) / 2).backward()
        compare_gradients(pair.model, plain, ROUNDED.gradient)


@on_ranks()
def test_with_changing_sizes() -> None:
    pair = _pair(1, rows=(4, 6, 10), dynamic=True)
    for _ in range(3):
        pair.zero_grad()
        pair.accumulate(loss=_of(slice(0, 1)))


@pytest.mark.parametrize(
    ("first", "second"), [(slice(0, 2), slice(0, 1)), (slice(0, 1), slice(0, 2)), (slice(0, 1), slice(0, 1))]
)
@on_ranks()
def test_pending_gradients_of_an_output_count_when_it_is_used_no_more(first: slice, second: slice) -> None:
    pair = _pair(1)
    for _ in range(2):  # the second step's graph has pending gradients among its inputs
        pair.zero_grad()
        pair.change(lambda model: model.set_requires_gradient_sync(False))
        pair.backward(loss=_of(first))
        pair.change(lambda model: model.set_requires_gradient_sync(True))
        pair.accumulate(loss=_of(second))


@on_ranks()
def test_nothing_is_updated_for_an_unused_output() -> None:
    pair = _pair(3)
    step_in_backward(optim.SGD(pair.model.parameters(), lr=0.1, weight_decay=0.5))
    before = [p.full_tensor().detach().clone() for p in pair.model.parameters()]
    _loss(pair.call(_input())[0]).backward()
    for (name, p), value in zip(pair.model.named_parameters(), before, strict=True):
        assert torch.equal(p.full_tensor(), value) == name.startswith("right"), name
