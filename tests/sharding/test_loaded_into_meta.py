"""A tied model on meta that gets its values from a checkpoint with `assign=True`: FSDP2 keeps it tied."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import distribute_tensor

from fsdp_compile import fully_shard
from tests.ranks import on_ranks


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embed(tokens))))


@on_ranks()
def test_it_stays_tied_as_with_fsdp2() -> None:
    torch.manual_seed(0)
    values = _Tied().state_dict()
    tokens = torch.arange(6).view(2, 3)
    gradients = []
    for shard in (fsdp2, fully_shard):
        with torch.device("meta"):
            model: Any = _Tied()
        shard(model)
        loaded = {
            name: nn.Parameter(distribute_tensor(values[name], held.device_mesh, held.placements))
            for name, held in model.state_dict().items()
        }
        model.load_state_dict(loaded, assign=True)
        model(tokens).square().mean().backward()
        gradients.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
    assert model.head.weight is model.embed.weight
    assert set(gradients[1]) == {"embed.weight", "inner.weight", "inner.bias"}
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name])
