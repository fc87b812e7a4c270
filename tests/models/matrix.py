"""Tiny models of the matrix, each with one thing that sharding has to get right, with or without recomputation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models.layers import Residual

WIDTH = 16
ROWS = 16


def make_batch(step: int) -> torch.Tensor:
    """The rows of all ranks and micro-batches, `[16, 16]`."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


class Block(Residual):
    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__(WIDTH, hidden)


class Plain(nn.Module):
    def __init__(self, *, recompute: bool, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Tied(Plain):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__(recompute=recompute)
        self.embed = nn.Embedding(11, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed((x.abs() * 4).long().clamp(max=10)).mean(1)))


class Frozen(Plain):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__(recompute=recompute)
        self.blocks[0].requires_grad_(requires_grad=False)
        self.get_parameter("blocks.1.up.weight").requires_grad = False


class Uneven(Plain):
    """Rows that divide over no number of ranks, and fewer rows than ranks."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__(recompute=recompute, hidden=2 * WIDTH + 1)
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Unused(Plain):
    def __init__(self, *, recompute: bool) -> None:
        super().__init__(recompute=recompute)
        self.unused = nn.Parameter(torch.ones(7))


class Repeated(Plain):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(super().body(x))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "plain": Plain,
    "tied": Tied,
    "frozen": Frozen,
    "uneven": Uneven,
    "unused": Unused,
    "repeated": Repeated,
}
