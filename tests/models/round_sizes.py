"""Small models whose sizes are round numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.explain import Plan
from fsdp_compile.explain import explain as plan_of
from tests.models.layers import InARow

WIDTH = 256


class Block(nn.Module):
    """A matmul large enough for a message of its own on 4 ranks, and two small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).relu()


class Stack(InARow):
    """Three blocks unless asked."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__(Block() for _ in range(depth))


class Broken(nn.Module):
    """Two halves with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Stack(2)
        self.second = Stack(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Partial(nn.Module):
    """One parameter is frozen and one is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(requires_grad=False)
        self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.used(x))


def on_meta(make: Callable[[], nn.Module], rows: int = 64) -> tuple[nn.Module, torch.Tensor]:
    """A model and its input, without memory."""
    with torch.device("meta"):
        return make(), torch.zeros(rows, WIDTH)


def explained(
    make: Callable[[], nn.Module] = Stack,
    world_size: int | None = 4,
    hardware: Hardware | None = None,
    x: torch.Tensor | int = 64,
    **options: Any,
) -> Plan:
    """The plan of such a model and an input, or so many rows of one; without Inductor unless asked."""
    model, x = on_meta(make, x) if isinstance(x, int) else (on_meta(make)[0], x)
    return plan_of(model, x, world_size=world_size, options={"lower": "eager", **options}, hardware=hardware)


def stack() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """What the command line is given."""
    return Stack(), (torch.zeros(64, WIDTH),)
