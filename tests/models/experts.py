"""A model with routed experts, each on one rank of an expert-parallel mesh: tokens go there and come back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

EXPERTS, WIDTH, HIDDEN = 4, 8, 12


def _send(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Sends so many of `rows` to each rank of a group, and gives what they sent."""
    return all_to_all_single_autograd(rows, received, sent, group)


class Experts(nn.Module):
    """Two matrices of each expert in two 3-d parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.group: dist.ProcessGroup | None = None

    def split(self, mesh: DeviceMesh) -> None:
        """Leaves this rank its experts alone."""
        for name in ("up", "down"):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        self.group = mesh.get_group()

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Tokens `[n, WIDTH]` in the order of their experts, `counts[e]` for expert e."""
        ranks = 1 if self.group is None else self.group.size()
        own = EXPERTS // ranks
        expected = counts.view(ranks, own)
        if self.group is not None:
            expected = torch.empty_like(counts)
            dist.all_to_all_single(expected, counts, group=self.group)
            expected = expected.view(ranks, own)  # [from which rank, for which of my experts]
            sent, received = counts.view(ranks, own).sum(1).tolist(), expected.sum(1).tolist()
            tokens = _send(tokens, received, sent, self.group)
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        pieces = list(tokens.split(expected.flatten().tolist()))
        for expert in range(own):
            mine = pieces[expert::own]
            done = torch.relu(torch.cat(mine) @ up[expert]) @ down[expert]
            pieces[expert::own] = done.split([len(piece) for piece in mine])
        tokens = torch.cat(pieces)
        return tokens if self.group is None else _send(tokens, sent, received, self.group)


class Routed(nn.Module):
    """Each token goes to the expert that likes it most."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        done = self.experts(tokens[order], torch.bincount(chosen, minlength=EXPERTS))
        return tokens + torch.zeros_like(tokens).index_copy(0, order, done) * weights[:, None]


class MixtureOfExperts(nn.Module):
    """Two such layers between two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Routed() for _ in range(2))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
