"""Accumulation of a compiled model's gradients over microbatches, beside one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import fully_shard, no_sync
from tests.beside import close, compile_eagerly, loss_of


def check_accumulation(make: Callable[[], nn.Module], width: int) -> None:
    """On a rank: two steps of two microbatches, the first of each under `no_sync`; inputs are `[rows, width]`."""
    torch.manual_seed(0)
    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    fully_shard(model)
    compiled, rank = compile_eagerly(model), dist.get_rank()
    for number in range(4):
        batch = torch.randn(4, width, generator=torch.Generator().manual_seed(number))
        if number % 2 == 0:
            with no_sync(model):
                loss_of(compiled(batch.chunk(2)[rank])).backward()
        else:
            loss_of(compiled(batch.chunk(2)[rank])).backward()
        loss_of(reference(batch)).backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(mine.grad.full_tensor(), theirs.grad, name)  # type: ignore[union-attr]
