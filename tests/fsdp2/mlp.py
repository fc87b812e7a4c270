"""Two models of the same values, one compiled and one not, that train side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.two_sides import WithFsdp2, made, mesh_of, taken_over

WIDTH = 16


class Mlp(nn.Module):
    """Layers that are a unit each, and a head; a bias of the first one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.layers[0].unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def shard(model: Any, mesh: tuple[int, ...] = (), **arguments: Any) -> Any:
    """Each layer and the rest a unit; with a shape of `mesh` (replicate, shard) hybrid."""
    if mesh:
        arguments["mesh"] = mesh_of(mesh)
    for module in (*model.layers, model):
        fully_shard(module, **arguments)
    return model


def sharded(**arguments: Any) -> Any:
    return shard(made(Mlp), **arguments)


def batch(step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def pair_of(
    make: Callable[[], nn.Module] = Mlp,
    *,
    fullgraph: bool = False,
    ours: Callable[[Any], object] | None = None,
    sharded: Callable[..., object] = shard,
    **arguments: Any,
) -> WithFsdp2:
    """Two models of the same values, one compiled and one not."""
    pair = WithFsdp2(
        make, lambda model: sharded(model, **arguments), batch, lambda call, x: call(x).square().sum(), ours=ours
    )
    pair.compiled(fullgraph=fullgraph, reduce_layout="fsdp2")
    return pair


def only_hooks(model: nn.Module) -> list[str]:
    """Of each unit, why FSDP2's hooks alone gather it."""
    return [unit.only_hooks for unit in taken_over(model).units]
