"""Every bit of FSDP2 eager on gloo: shard groups of more than two ranks, and gradients held between micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_compile
from fsdp_compile.parity.experiment import Accumulation, Experiment
from fsdp_compile.parity.train import train_both
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import MIXED


class Odd(nn.Module):
    """Sizes that no number of ranks divides, one parameter that is large, and one that stands between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(67)
        self.up = nn.Linear(67, 301)
        self.middle = nn.LayerNorm(301)
        self.down = nn.Linear(301, 67)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.middle(self.up(self.norm(x))).relu())


def make_model() -> nn.Module:
    return nn.Sequential(Odd(), Odd(), nn.Linear(67, 5))


def make_batch(step: int) -> torch.Tensor:
    return torch.randn(24, 67, generator=torch.Generator().manual_seed(step))


def _average(_state: object, gradient: torch.Tensor, output: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(output, gradient, op=dist.ReduceOp.AVG)


def _with_a_hook(model: nn.Module, fully_shard: Callable[..., nn.Module]) -> None:
    """A hook on the compiled side that does what FSDP2 does by itself."""
    for part in model.children():
        fully_shard(part)
    fully_shard(model)
    if fully_shard is fsdp_compile.fully_shard:
        fsdp_compile.register_comm_hook(model, _average)


HELD = {"micro_batches": 2, "accumulation": Accumulation.HOLD}


PLANNED = {"prefetch": "auto", "reduce_layout": "fsdp2", "bucket_mb": "auto"}
CASES: dict[str, dict[str, Any]] = {
    "full shard": {},
    "bf16, every micro-batch": {"mp_policy": MIXED, "micro_batches": 2},
    "held": HELD,
    "held, ZeRO-2, bf16": {**HELD, "reshard_after_forward": False, "mp_policy": MIXED},
    "held, hybrid": {**HELD, "replicas": 2},
    "held, hybrid, bf16": {**HELD, "replicas": 2, "mp_policy": MIXED},
    "planned, bf16, held, 3 ranks": {**HELD, "mp_policy": MIXED, "options": PLANNED, "world_size": 3},
    "planned, a hook, 3 ranks": {"options": PLANNED, "prepare": _with_a_hook, "world_size": 3},
}


@pytest.mark.long
@pytest.mark.core
@pytest.mark.parametrize("world_size", [3, 4])
@on_ranks(world_size=lambda world_size: world_size)
def test_more_than_two_ranks_have_the_bits_of_fsdp2(world_size: int) -> None:
    for name, changes in CASES.items():
        settings: dict[str, Any] = {"world_size": 4, "steps": 2, **changes}
        if settings["world_size"] == world_size:
            found = train_both(Experiment(make_model=make_model, make_batch=make_batch, **settings))
            assert [f"{d.name} {d.step}" for d in found if d.different] == [], name


def _places_that_differ(share: int) -> list[int]:
    """Of the same 64 numbers per rank, those whose sum over ranks has other bits in a message of `share` per rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.randn(16, world, world, 64, generator=torch.Generator().manual_seed(0))[:, rank]
    sums = []
    for length in (share, 64):
        reduced = torch.empty(16, length)
        for message, result in zip(nn.functional.pad(numbers, [0, length - 64]), reduced, strict=True):
            dist.reduce_scatter_tensor(result, message.reshape(-1))
        sums.append(reduced[:, :64])
    return (sums[0] != sums[1]).any(0).nonzero().flatten().tolist()


def test_gloo_adds_in_an_order_that_depends_on_the_place_unless_shares_are_even() -> None:
    assert run_ranks(_places_that_differ, 96, world_size=4) == [[], [], [], []]
    odd = run_ranks(_places_that_differ, 65, world_size=4)
    assert any(odd)
    assert all(place < 2 * 4 for places in odd for place in places)
    assert run_ranks(_places_that_differ, 65, world_size=2) == [[], []]
