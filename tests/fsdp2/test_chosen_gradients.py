"""`backward(inputs=...)` and `autograd.grad()` of sharded parameters: as in one process, or refused by name."""

from __future__ import annotations

from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests import long
from tests.models.outlines import Small
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, close, loss_of

HOW: Final = long.parametrize("how", [Run.PLAIN, Run.SHARDED], always=[Run.SHARDED], ids=lambda how: how.value)
Gradients = tuple[torch.Tensor | None, ...]


class _Branches(Small):
    """`Small`, and a layer that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


def _chosen(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith("up.")]


def _losses(pair: WithOneProcess) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank's share, and of the whole batch in one process."""
    batch = torch.randn(2 * dist.get_world_size(), 6, generator=torch.Generator().manual_seed(1))
    mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
    return loss_of(pair.call(mine)), loss_of(pair.reference(batch))


@HOW
@on_ranks()
def test_gradients_are_returned_and_not_accumulated(how: Run) -> None:
    pair = WithOneProcess(_Branches, how)
    pair.call(torch.ones(2, 6))
    loss, expected = _losses(pair)
    mine: Gradients = torch.autograd.grad(loss, _chosen(pair.model), retain_graph=True)
    theirs: Gradients = torch.autograd.grad(expected, _chosen(pair.reference), retain_graph=True)
    for gradient, other in zip(mine, theirs, strict=True):
        assert isinstance(gradient, DTensor)
        close(gradient.full_tensor(), other, "gradient")
    for model, of in ((pair.model, loss), (pair.reference, expected)):
        unused = list(model.unused.parameters())  # type: ignore[union-attr, operator, unused-ignore]
        none: Gradients = torch.autograd.grad(of, unused, retain_graph=True, allow_unused=True)
        assert none == (None, None)
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(of, unused, retain_graph=True)
    assert not any(p.grad is not None for p in pair.model.parameters())


def _penalty(model: nn.Module) -> torch.Tensor:
    """Outside of the forward, as docs/limits.md says to write it."""
    penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return penalty.full_tensor() if isinstance(penalty, DTensor) else penalty


@HOW
@on_ranks()
def test_a_penalty_outside_of_the_forward_counts(how: Run) -> None:
    pair = WithOneProcess(_Branches, how)
    pair.call(torch.ones(2, 6))
    for with_loss in (True, False):
        found: list[Gradients] = []
        for model, loss in zip(pair, _losses(pair), strict=True):
            total = _penalty(model) + (loss if with_loss else 0)
            asked = [*_chosen(model), *model.unused.parameters()]  # type: ignore[union-attr, operator, unused-ignore]
            found.append(torch.autograd.grad(total, asked, retain_graph=True))
            total.backward(inputs=asked)
        for mine, theirs in zip(*found, strict=True):
            assert isinstance(mine, DTensor)
            close(mine.full_tensor(), theirs, "gradient")
        pair.compare()
