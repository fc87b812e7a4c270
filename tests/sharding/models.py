"""Small models, trained with torch's FSDP2 and with ours, or in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile._torch.fully_shard import state_of
from tests.models.kinds import WIDTH
from tests.two_sides import Run, WithFsdp2, Within, WithOneProcess, whole


class Block(nn.Module):
    """Two linear layers, the second of which `Sequential` makes look like repeated blocks."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width + 1), nn.Tanh(), nn.Linear(2 * width + 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False, scale: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5)) if scale else None
        self.empty = nn.Parameter(torch.empty(0, 3)) if scale else None
        self.count = nn.Parameter(torch.tensor([3, 4]), requires_grad=False) if scale else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits if self.scale is None else logits * self.scale


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 5))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (x.dtype, self.scale.dtype)
        return self.down(torch.relu(self.norm(self.up(x)))) * self.scale


def same_call(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Modules on which torch's `fully_shard` was called, those of one call together."""
    calls: dict[object, list[nn.Module]] = {}
    for module in modules:
        if (state := state_of(module)) is not None:
            calls.setdefault(state, []).append(module)
    return list(calls.values())


def made(make: Callable[[], nn.Module] = Model, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    """The tokens of a rank in a step."""
    torch.manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randint(0, 7, (2, 5))


def _loss(call: Any, tokens: torch.Tensor) -> torch.Tensor:
    return call(tokens).float().square().mean()


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=0.01, foreach=False)


def train_alike(ours: nn.Module, theirs: nn.Module) -> None:
    """Trains two sharded models, which must be equal to the bit."""
    pair = WithFsdp2(iter((ours, theirs)).__next__, id, batch, _loss, optimizer=_adamw)
    pair.train(steps=3)


def train_near_one_process(model: nn.Module, reference: nn.Module, steps: int = 3, atol: float = 1e-5) -> None:
    """Trains a sharded model beside its copy on the batches of all ranks."""
    pair = WithOneProcess(
        lambda: model, Run.UNSHARDED, loss=_loss, reference=reference, optimizer=_adamw, batch=world_batch, twice=False
    )
    bound = (1e-5, atol)
    # Gradients in a narrow dtype are as large as they are: it rounds them in proportion.
    pair.train(steps=steps, within=Within(bound, (atol, atol), bound))


def full(model: nn.Module) -> list[torch.Tensor]:
    return [whole(p).detach().clone() for p in model.parameters()]


def world_batch(step: int) -> torch.Tensor:
    return torch.cat([batch(step, rank) for rank in range(dist.get_world_size())])


def same(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
