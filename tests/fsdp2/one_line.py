"""A plain model for the one line, beside a copy of it that one process trains on the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.models.layers import Residual
from tests.two_sides import Make, Run, WithOneProcess, adamw


class Block(Residual):
    """A block with a residual."""

    def __init__(self) -> None:
        super().__init__(6, 9)


class Model(nn.Module):
    """Two blocks and a head, all of sizes that two ranks share unevenly or evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs for a batch."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pair_of(make: Callable[[], nn.Module] = Model, optimizer: Make = adamw) -> WithOneProcess:
    """Optimizers are made before anything is sharded; what a test compiles, it assigns to `call`."""
    return WithOneProcess(make, Run.UNSHARDED, optimizer=optimizer, twice=False)
