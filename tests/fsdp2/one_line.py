"""A plain model that is compiled for the backend, beside a copy of it that one process trains on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

EAGER = {"lower": "eager"}


def one_line(function: Any, **options: Any) -> Any:
    """The backend without Inductor."""
    return torch.compile(function, backend="fsdp", options={**EAGER, **options})


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    """As `one_line`, by `module.compile`."""
    module.compile(backend="fsdp", options={**EAGER, **options})
    return module


class Block(nn.Module):
    """A block with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block of `x`."""
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


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
        out: torch.Tensor = self.head(x)
        return out


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.AdamW(parameters, lr=1e-2)


class Pair:
    """A plain model and its reference, with an optimizer each, made before anything is sharded.

    Attributes:
        call: What is called for the model.
    """

    def __init__(self, make: Callable[[], nn.Module] = Model, optimizer: Make = adamw) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.reference = copy.deepcopy(self.model)
        self.held = list(self.model.parameters())
        self.optimizers = [optimizer(list(m.parameters())) for m in (self.model, self.reference)]
        self.call: Callable[..., Any] = self.model
        self.batches = 0

    def backward(self) -> None:
        """Forward and backward of both on the next batch; gradients of the reference are those of the mean loss."""
        self.batches += 1
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        batch = torch.randn(2 * world, 6, generator=torch.Generator().manual_seed(self.batches))
        self.call(batch.chunk(world)[rank]).square().mean().backward()
        self.reference(batch).square().mean().backward()

    def update(self) -> None:
        """Steps and clears both optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def steps(self, count: int = 1) -> None:
        """Training steps of both, which must agree after each."""
        for _ in range(count):
            self.backward()
            self.update()
            self.compare()

    def compare(self) -> None:
        """Asserts that both have the same parameters and gradients, and that the model is sharded."""
        theirs = dict(self.reference.named_parameters())
        assert list(dict(self.model.named_parameters())) == list(theirs)
        for name, mine in self.model.named_parameters():
            assert isinstance(mine, DTensor), name
            torch.testing.assert_close(mine.full_tensor(), theirs[name].data, rtol=1e-5, atol=1e-5, msg=name)
            expected = theirs[name].grad
            assert (mine.grad is None) == (expected is None), name
            if isinstance(mine.grad, DTensor):
                torch.testing.assert_close(mine.grad.full_tensor(), expected, rtol=1e-5, atol=1e-5, msg=name)
