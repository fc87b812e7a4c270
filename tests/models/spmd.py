"""A small model that is written for a whole mesh: all that it computes with are DTensors over all of it."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WIDTH = 8


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Spmd(nn.Module):
    """Makes the DTensor of this rank's rows by itself, if it is not given one."""

    def __init__(self, layers: int = 2, hidden: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(hidden) for _ in range(layers))
        self.mesh: DeviceMesh | None = None
        self.names: tuple[str, ...] = ()
        self.rows_over: tuple[str, ...] = ()

    def spread(self, mesh: DeviceMesh, tensor_parallel: str | None, rows_over: tuple[str, ...]) -> Spmd:
        """Makes DTensors of all parameters: hidden units are split over one dimension, rows over others."""
        names = mesh.mesh_dim_names
        assert names is not None
        split = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
        for layer in self.layers:
            for name, value in list(layer.named_parameters()):
                own = split.get(name, Replicate())
                placements = [own if dim == tensor_parallel else Replicate() for dim in names]
                module, attribute = layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                whole = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
                setattr(module, attribute, nn.Parameter(whole))
        self.mesh, self.names, self.rows_over = mesh, names, rows_over
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        placements = [Shard(0) if name in self.rows_over else Replicate() for name in self.names]
        if self.mesh is not None and not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, placements, run_check=False)
        for layer in self.layers:
            x = layer(x)
        return x.redistribute(self.mesh, placements) if isinstance(x, DTensor) else x
