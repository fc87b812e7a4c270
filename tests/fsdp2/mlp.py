"""Two models of the same values, one compiled and one not, that train side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_compile.backend import fsdp
from fsdp_compile.fsdp2.take_over import model_of

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


def sharded(mesh: tuple[int, ...] = (), **arguments: Any) -> Any:
    """A new model, each layer and the rest a unit; with a shape of `mesh` (replicate, shard) hybrid."""
    torch.manual_seed(0)
    model = Mlp()
    if mesh:
        arguments["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for module in (*model.layers, model):
        fully_shard(module, **arguments)
    return model


def compiled(model: nn.Module, *, fullgraph: bool = False) -> Any:
    """The model, compiled."""
    return torch.compile(model, backend=fsdp, options={"lower": "eager", "reduce_layout": "fsdp2"}, fullgraph=fullgraph)


def batch(step: int) -> torch.Tensor:
    """Of this rank."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def local(tensor: Any) -> torch.Tensor | None:
    """This rank's part of a DTensor."""
    return None if tensor is None else tensor.to_local().detach().clone()


def train(
    model: Any, call: Any, *, steps: int = 2, micro_batches: int = 1, before: Callable[[Any, int], None] | None = None
) -> list[torch.Tensor | None]:
    """Losses, gradients and parameters of this rank; `before` is called with the model and each microbatch's number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[torch.Tensor | None] = []
    for step in range(steps):
        for number in range(micro_batches):
            if before is not None:
                before(model, number)
            loss = call(batch(step * micro_batches + number)).square().sum()
            loss.backward()
            found.append(loss.detach())
        found += [local(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(local, model.parameters())]


def unequal(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> list[int]:
    """Places of what is not equal to the bit, both `None` being equal."""
    both = enumerate(zip(first, second, strict=True))
    return [i for i, (a, b) in both if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))]  # type: ignore[arg-type]


def only_hooks(model: nn.Module) -> list[str]:
    """Of each unit, why FSDP2's hooks alone gather it."""
    taken = model_of(model)
    assert taken is not None
    return [unit.only_hooks for unit in taken.units]
