"""A compiled function that does a whole training step: it clears, computes, reads and clips gradients, and updates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models.outlines import Small
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess, close, compile_eagerly, loss_of


def _step_of(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer, *, clip: bool) -> torch.Tensor:
    model.zero_grad()
    loss_of(model(batch)).backward()
    missing = torch.tensor(sum(p.grad is None for p in model.parameters()))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if clip else missing
    optimizer.step()
    return norm + missing


@pytest.mark.parametrize("dynamic", [None, True])
@on_ranks()
def test_it_trains_as_one_process(*, dynamic: bool | None) -> None:
    pair = WithOneProcess(Small, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    mine, theirs = pair.optimizers[0]
    # Torch's clipping of sharded parameters cannot be traced with `dynamic=True`.
    step = compile_eagerly(_step_of, dynamic=dynamic)
    for number in range(3):
        pair.rows = 2 + number
        share, batch = pair.next_batch()
        norm = step(pair.model, share, mine, clip=not dynamic)
        close(norm, _step_of(pair.reference, batch, theirs, clip=not dynamic), "norm")
        pair.compare()
