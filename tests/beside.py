"""A sharded model beside a copy of it that one process trains on the whole batch."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard

TOLERANCE = 1e-5


class Run(enum.Enum):
    """How a sharded model is run."""

    PLAIN = "plain"
    """Compiled as it is, and sharded at its first call."""
    SHARDED = "sharded"
    """Sharded, then compiled."""
    EAGER = "eager"
    """Sharded, not compiled: every read gathers by itself."""
    UNSHARDED = "unsharded"
    """Neither yet."""


C = TypeVar("C", bound=Callable[..., Any])


def compile_eagerly(function: C) -> C:
    """The backend without Inductor: transformed graphs run operator by operator."""
    compiled: Any = torch.compile(function, backend="fsdp", options={"lower": "eager"})
    return compiled


class Beside:
    """The two models, and what is done to both.

    Args:
        make: Makes the model.
        how: How it is run.

    Attributes:
        model: Sharded, or about to be at its first compiled call.
        reference: The copy.
        compiled: What is called for `model`.
    """

    def __init__(self, make: Callable[[], nn.Module], how: Run) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.reference = copy.deepcopy(self.model)
        if how in (Run.SHARDED, Run.EAGER):
            fully_shard(self.model)
        self.compiled: Callable[[torch.Tensor], torch.Tensor] = self.model
        if how in (Run.SHARDED, Run.PLAIN):
            self.compiled = compile_eagerly(self.model)
        self.optimizers: list[tuple[torch.optim.Optimizer, torch.optim.Optimizer]] = []
        self.steps = 0

    def both(self) -> tuple[nn.Module, nn.Module]:
        """The sharded model, then its reference."""
        return self.model, self.reference

    def change(self, change: Callable[[nn.Module], object]) -> None:
        """Does the same to both models."""
        for model in self.both():
            change(model)

    def optimize(self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Adds an optimizer over the parameters that each model has now."""
        self.optimizers.append((make(self.model.parameters()), make(self.reference.parameters())))

    def backward(self, *, width: int = 6, dtype: torch.dtype = torch.float32) -> None:
        """Forward and backward of both on the next batch."""
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        world, rank = dist.get_world_size(), dist.get_rank()
        batch = torch.randn(2 * world, width, generator=generator).to(dtype)
        mean = loss_of(self.compiled(batch.chunk(world)[rank])).detach()
        loss = loss_of(self.compiled(batch.chunk(world)[rank]))
        assert torch.equal(loss.detach(), mean), "the second call read something else"
        loss.backward()
        expected = loss_of(self.reference(batch))
        expected.backward()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / world, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)

    def step(self, *, width: int = 6, dtype: torch.dtype = torch.float32) -> None:
        """One training step of both; parameters must agree after it."""
        self.backward(width=width, dtype=dtype)
        for pair in self.optimizers:
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        self.compare()

    def compare(self) -> None:
        """Asserts that both models have the same values and gradients, and that the sharded one is sharded."""
        theirs = dict(self.reference.named_parameters())
        assert list(dict(self.model.named_parameters())) == list(theirs)
        for name, mine in self.model.named_parameters():
            # What FSDP2 cannot split stays whole.
            assert isinstance(mine, DTensor) == bool(mine.dim() and mine.numel()), name
            assert mine.requires_grad == theirs[name].requires_grad, name
            close(_whole(mine), theirs[name], name)
            assert (mine.grad is None) == (theirs[name].grad is None), name
            if mine.grad is not None:
                assert isinstance(mine.grad, DTensor) == isinstance(mine, DTensor), name
                close(_whole(mine.grad), theirs[name].grad, f"gradient of {name}")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss that averages over the batch."""
    return output.square().mean()


def close(mine: torch.Tensor, theirs: torch.Tensor | None, name: str) -> None:
    """Asserts equality up to rounding, naming what differs."""
    assert theirs is not None
    torch.testing.assert_close(
        mine, theirs.detach(), rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name}: {text}"
    )
