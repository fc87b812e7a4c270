"""Small models whose graphs have what graphs can have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fully_shard


class Mlp(nn.Module):
    """Two layers, with uneven rows at 8 ranks; the first is a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 18)
        self.second = nn.Linear(18, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def mlp() -> nn.Module:
    model = Mlp()
    fully_shard(model.first)
    return fully_shard(model)


def replicated_mlp() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(Mlp(), mesh=mesh)


class Normed(nn.Module):
    """A norm between two layers, of which one is sent by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 130)
        self.norm = nn.LayerNorm(130)
        self.second = nn.Linear(130, 130)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def normed() -> nn.Module:
    return fully_shard(Normed(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


class Tied(nn.Module):
    """One embedding, read on the way in and on the way out, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 6)
        self.head = nn.Linear(6, 19, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens) * self.scale).transpose(0, 1)


def tied() -> nn.Module:
    return fully_shard(Tied())


class Mixed(nn.Module):
    """A frozen layer, one without a gradient, dropout, attention, a division of the batch and a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False
        self.used = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(self.used(self.frozen(x)), 0.25)
        y = y.view(x.shape[0] // 2, 2, 16)
        y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
        return torch.cat([y[..., 1::2], y[..., ::2].to(torch.float64).float()], 2).clamp(max=float("inf"))


def mixed() -> nn.Module:
    return fully_shard(Mixed())
