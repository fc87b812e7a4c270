"""Collectives of the program's own, beside units that do not come one after the other, or of weights alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from fsdp_compile import fully_shard
from tests.ranks import on_ranks
from tests.two_sides import compare_gradients, compile_eagerly, made

WIDTH, ROWS = 256, 16


class _Own(nn.Module):
    """Has collectives of its own, unless it is `alone`; all ranks have the same rows here."""

    alone = False

    def units(self) -> list[nn.Module]:
        return []


class _Centered(_Own):
    """Takes away the mean of all rows of all ranks."""

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


class _NormOfWeight(_Own):
    """Divides a weight by its norm over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.weight = nn.Parameter(torch.randn(WIDTH - 1, WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        squares = self.weight.square().sum()
        total = 2 * squares if self.alone else funcol.all_reduce(squares, "sum", dist.group.WORLD)
        return (torch.tanh(self.first(x)) @ (16 * self.weight / total.sqrt()).t(),)


class _GatheredWeight(_NormOfWeight):
    """Multiplies with a part of what all ranks have of a weight."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = self.weight
        if not self.alone:
            weight = funcol.all_gather_tensor_autograd(weight, 0, dist.group.WORLD)[: WIDTH - 1]
        return (torch.tanh(self.first(x)) @ weight.t(),)


class _Together(_SideOutput):
    """Its collectives are one, whose messages torch 2.15 waits for together."""

    def centered(self, h: torch.Tensor) -> torch.Tensor:
        mean, largest = h.mean(0), h.detach().abs().amax(0)
        if not self.alone:
            mean, largest = (each / 2 for each in funcol.all_reduce_coalesced([mean, largest], "sum", dist.group.WORLD))
        return (h - mean) * (1 + largest)


def _check(kinds: Sequence[type[_Own]]) -> None:
    """Gradients are those of one process, and no weight is saved for backward."""
    for kind in kinds:
        torch.compiler.reset()
        reference, model = made(kind), made(kind)
        reference.alone = True
        inputs = torch.randn(ROWS, WIDTH)
        for unit in (*model.units(), model):
            fully_shard(unit, reshard_after_forward=True)
        compiled = compile_eagerly(model, bucket_mb=0)
        saved: list[torch.Size] = []

        def pack(tensor: torch.Tensor, saved: list[torch.Size] = saved) -> torch.Tensor:
            saved.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = compiled(inputs)
        for each in (outputs, reference(inputs)):
            sum((y + 0.3).square().mean() for y in each).backward()
        compare_gradients(model, reference, (1e-3, 1e-7))
        assert not any(set(shape) == {WIDTH - 1, WIDTH} for shape in saved)


@on_ranks()
def test_collectives_of_this_package_keep_their_order_around_the_programs() -> None:
    _check((_SideOutput, _Probe, _Together))


@on_ranks()
def test_a_collective_of_a_weight_alone_runs_once_and_what_follows_from_it_is_not_saved() -> None:
    _check((_NormOfWeight, _GatheredWeight))
