"""Ranks without rows take part in all collectives, or the error says why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard
from tests import long
from tests.numerics.one_process.measure import batches, gradient_difference
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import compile_eagerly, compile_in_place, loss_of, share


class _Expert(nn.Sequential):
    """A forward of its own: in place torch 2.11 compiles nothing of a module of its own classes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


class _Mixture(nn.Module):
    """Positive rows go to one expert, the others to another; the choice runs in Python, the experts are compiled."""

    skips_empty = False

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(_Expert(nn.Linear(32, width), nn.Linear(width, 32)) for width in (8, 9))
        self.head = _Expert(nn.Linear(32, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] <= 0).long()
        y = x.clone()
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel() or not self.skips_empty:
                y = y.index_add(0, rows, expert(x[rows]))
        return self.head(y)


@pytest.mark.core
@on_ranks(timeout_s=100)
def test_an_expert_without_rows_is_called_with_none_or_the_error_says_so() -> None:
    """The first expert has no rows on rank 1: once it is called there with none, once it is not called."""
    torch.manual_seed(0)
    (batch,) = batches(1, 8)
    batch[:, 0] = torch.tensor([1.0, -1, 1, -1, -1, -1, -1, -1])
    model, other = _Mixture(), _Mixture()
    other.skips_empty = True
    reference = copy.deepcopy(model)
    for each in (model, other):
        options: dict[str, Any] = {"prefetch": 2} if each.skips_empty else {}
        for part in (*each.experts, each.head):
            compile_in_place(fully_shard(part), **options)
    fully_shard(model)
    loss_of(model(share(batch))).backward()
    loss_of(reference(batch)).backward()
    assert gradient_difference(model, reference) < 1e-6
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"compile different collectives[\s\S]* with an empty tensor"):
        other(share(batch))


class _Bias(nn.Module):
    """Its input is so narrow that the partition computes the sum again, which only reads the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.bias).sin()


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = _Bias(), nn.Linear(64, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(checkpoint(self.b, self.a(x), use_reentrant=False))
        return y


def _without_rows(*steps: tuple[int, int]) -> float:
    torch.manual_seed(0)
    model = _Checkpointed()
    reference = copy.deepcopy(model)
    fully_shard(model.a)
    compiled = compile_eagerly(fully_shard(model))
    worst = 0.0
    for rows in steps:
        every = [torch.randn(count, 3, 1) for count in rows]
        compiled(every[dist.get_rank()]).square().sum().backward()
        torch.stack([reference(batch).square().sum() for batch in every]).mean().backward()
        worst = max(worst, gradient_difference(model, reference))
    return worst


ROWS = [[(0, 3)], [(3, 0)], [(2, 2), (2, 0), (0, 2)]]


@pytest.mark.core
@long.parametrize("steps", ROWS, always=ROWS[-1:], ids=str)
def test_a_rank_without_rows_computes_again_what_the_others_do(steps: list[tuple[int, int]]) -> None:
    assert max(run_ranks(_without_rows, *steps, timeout_s=60)) < 1e-5
