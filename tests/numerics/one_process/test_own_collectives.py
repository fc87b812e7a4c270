"""Collectives of the program's own in units that do not come one after the other: gradients of one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from fsdp_compile import fully_shard
from tests.ranks import run_ranks

WIDTH, ROWS = 256, 16


class _Centered(nn.Module):
    """Takes away the mean of all rows of all ranks, which have the same rows here."""

    alone = False

    def centered(self, h: torch.Tensor) -> torch.Tensor:
        mean = h.mean(0)
        return h - (mean if self.alone else funcol.all_reduce(mean, "sum", dist.group.WORLD) / 2)


class _SideOutput(_Centered):
    """Backward has the gradient of the side output, the root's last one, before it needs what the collective sends."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, 8, bias=False)
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def units(self) -> list[nn.Module]:
        return [self.inner]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        side = self.side(x)
        return side, self.centered(torch.tanh(self.inner(x)) * self.scale)


class _Probe(_Centered):
    """Backward reads the root first for a probe on detached features, which no collective needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.probe = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def units(self) -> list[nn.Module]:
        return [self.inner, self.head]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.tanh(self.inner(x))
        return self.head(self.centered(h) * self.scale), self.probe(h.detach())


def _train(model: Any, inputs: torch.Tensor, units: list[nn.Module]) -> list[str]:
    """Names of parameters whose gradients are not those of one process."""
    torch.compiler.reset()
    reference = copy.deepcopy(model)
    reference.alone = True
    for unit in (*units, model):
        fully_shard(unit)
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager", "bucket_mb": 0})
    for called in (compiled, reference):
        sum((y + 0.3).square().mean() for y in called(inputs)).backward()
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-3, atol=1e-7)]


def _of_all() -> dict[str, list[str]]:
    found = {}
    for kind in (_SideOutput, _Probe):
        torch.manual_seed(0)
        model = kind()
        found[kind.__name__] = _train(model, torch.randn(ROWS, WIDTH), model.units())
    return found


def test_collectives_of_this_package_keep_their_order_around_the_programs() -> None:
    assert run_ranks(_of_all, world_size=2) == [{"_SideOutput": [], "_Probe": []}] * 2
