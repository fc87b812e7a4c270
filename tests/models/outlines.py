"""Models of every outline that the automatic split has to understand, and one with every odd shape."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_compile._torch.fully_shard import has_group_lists
from tests.models.layers import Residual

WIDTH = 16


class Block(Residual):
    """One whose hidden width does not divide over 2 or 4 ranks."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH + 1)


class Transformer(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Odd(nn.Module):
    """Uneven rows, fewer rows than ranks, a number, nothing, a frozen weight, two dtypes. Input: `[rows, 10]`."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Linear(10, 13)
        self.few = nn.Linear(13, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.full((1,), 0.25))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.randn(3, 5), requires_grad=False)
        # Up to torch 2.11 a unit of FSDP2 has one dtype in its trainable parameters.
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64 if has_group_lists() else torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.few(torch.tanh(self.uneven(x))) * self.scale + self.one + self.empty.sum()
        return (x @ self.frozen).double() * self.wide


class Small(nn.Module):
    """Two layers and a number. Input: `[rows, 6]`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


class MixedKinds(nn.Module):
    """Uneven, 0-d, tied, frozen and bfloat16 parameters; saved and other buffers. Input: `[rows, 6]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 6)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.first.weight
        self.narrow = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x))) * self.scale
        x = self.narrow(self.tied(self.second(x)).bfloat16()).float()
        return x + self.frozen
