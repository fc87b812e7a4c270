"""A compiled function that does a whole training step: it clears, computes, reads and clips gradients, and updates."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.beside import Beside, Run, close, loss_of
from tests.models.outlines import Small
from tests.ranks import run_ranks


def _step_of(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer, *, clip: bool) -> torch.Tensor:
    model.zero_grad()
    loss_of(model(batch)).backward()
    missing = torch.tensor(sum(p.grad is None for p in model.parameters()))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if clip else missing
    optimizer.step()
    return norm + missing


def _steps(*, dynamic: bool | None) -> None:
    pair = Beside(Small, Run.SHARDED)
    world, rank = dist.get_world_size(), dist.get_rank()
    mine, theirs = (torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in pair.both())
    # Torch's clipping of sharded parameters cannot be traced with `dynamic=True`.
    step = torch.compile(_step_of, backend="fsdp", options={"lower": "eager"}, dynamic=dynamic)
    for number in range(3):
        batch = torch.randn((2 + number) * world, 6, generator=torch.Generator().manual_seed(number))
        norm = step(pair.model, batch.chunk(world)[rank], mine, clip=not dynamic)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        close(whole, _step_of(pair.reference, batch, theirs, clip=not dynamic), "norm")
    pair.compare()


@pytest.mark.parametrize("dynamic", [None, True])
def test_it_trains_as_one_process(*, dynamic: bool | None) -> None:
    run_ranks(_steps, dynamic=dynamic)
