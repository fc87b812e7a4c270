"""Models that torch's own `fully_shard` shards: blocks, then the root; and full values, for comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.tensors import local_tensor, set_local_tensor
from tests.two_sides import mesh_of, whole


class Block(nn.Module):
    """Rows that divide over no number of ranks. Input: `[rows, 6]`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Tied weights, a frozen one, one that no forward reads, a number that FSDP2 does not shard, and buffers."""

    seen: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.unread = nn.Parameter(torch.randn(3, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x) * self.scale) @ self.frozen.T


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net()


def sharded(seed: int = 0, shape: tuple[int, ...] = (2,)) -> Any:
    model, mesh = made(seed), mesh_of(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
    return model


def batch(seed: int = 0) -> torch.Tensor:
    """The same on all ranks, so that gradients are those of one process."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for seed in range(steps):
        model(batch(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def assert_same(mine: Any, theirs: Any) -> None:
    """Equal bit for bit, DTensors as their full values."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, dict):
            assert_same(mine[name], value)
        elif isinstance(value, torch.Tensor):
            assert mine[name].dtype == value.dtype, name
            assert torch.equal(whole(mine[name]), whole(value)), name
        else:
            assert mine[name] == value, (name, mine[name], value)


def put_into_one_storage(parameters: list[Any]) -> torch.Tensor:
    """Moves the shards of parameters of one dtype into one buffer, as views of it; they stay the same DTensors."""
    sizes = [local_tensor(p).numel() for p in parameters]
    buffer = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
    for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
        shard = local_tensor(parameter)
        set_local_tensor(parameter, part.view(shard.shape).copy_(shard.detach()))
    return buffer
