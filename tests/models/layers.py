"""What models of several files are made of."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """Norm, wide layer, narrow layer, added to the input: two small parameters and two large ones with biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(this, x: torch.Tensor) -> torch.Tensor:  # noqa: N805  some people write it so
        return x + this.down(F.gelu(this.up(this.norm(x))))


class InARow(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
