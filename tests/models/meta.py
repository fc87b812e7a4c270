"""Models that are hard to initialize part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Norm(nn.Module):
    """A scale, a 0-d temperature, a counter and a table that is not saved."""

    seen: torch.Tensor
    table: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.temperature = nn.Parameter(torch.empty(()))
        self.register_buffer("seen", torch.empty((), dtype=torch.long))
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.uniform_(0.5, 1.5)
            self.temperature.fill_(2.0)
            self.seen.zero_()
            torch.arange(self.table.numel(), out=self.table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale / self.temperature + 0.01 * self.table


class Block(nn.Module):
    """Uneven sizes, a norm of its own, and one that all blocks share."""

    def __init__(self, width: int, shared: nn.Module) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.shared = shared
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.shared(self.norm(x)))))


class Tied(nn.Module):
    """Embedding and head share a weight of 11 rows; one block is frozen; the mask is a plain buffer."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width, padding_idx=3)
        shared = Norm(width)
        self.blocks = nn.ModuleList(Block(width, shared) for _ in range(2))
        self.blocks[1].up.requires_grad_(False)  # noqa: FBT003  torch takes it by position only
        self.middle = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
        self.average = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.middle(x.bfloat16()).float()
        return self.head(self.average(x))


def initialize(model: nn.Module) -> None:
    """The plain loop that `materialize` has to agree with."""
    with torch.no_grad():
        for module in model.modules():
            if module._parameters or module._buffers:
                module.reset_parameters()  # type: ignore[operator]


def tokens(rows: int = 4) -> torch.Tensor:
    """The same input on every rank."""
    return torch.randint(0, 11, (rows,), generator=torch.Generator().manual_seed(3))


def on_meta(make: Callable[[], nn.Module]) -> Any:
    """A model without values."""
    with torch.device("meta"):
        return make()


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, non-persistent ones too, in full."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.detach() for n, t in named}


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    """The same values under the same names, all on the CPU."""
    mine, theirs = full_state(model), full_state(reference)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name].device.type == "cpu", name
        assert torch.equal(mine[name], value), name
