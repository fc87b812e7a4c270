"""Every bit of FSDP2 eager on gloo: shard groups of more than two ranks, and gradients held between micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_compile
from fsdp_compile.parity.experiment import Accumulation, Experiment
from fsdp_compile.parity.train import train_both
from tests.ranks import run_ranks

_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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


def _experiment(**changes: Any) -> Experiment:
    settings: dict[str, Any] = {"world_size": 4, "steps": 2}
    return Experiment(make_model=make_model, make_batch=make_batch, **settings | changes)


def _different(experiments: list[Experiment]) -> list[list[str]]:
    """For each, what differs in a bit."""
    return [[f"{d.name} {d.step}" for d in train_both(e) if d.different] for e in experiments]


HELD = {"micro_batches": 2, "accumulation": Accumulation.HOLD}


@pytest.mark.long
@pytest.mark.core
def test_four_ranks_have_the_bits_of_fsdp2() -> None:
    cases = {
        "full shard": _experiment(),
        "bf16, every micro-batch": _experiment(mp_policy=_BF16, micro_batches=2),
        "held": _experiment(**HELD),
        "held, ZeRO-2, bf16": _experiment(**HELD, reshard_after_forward=False, mp_policy=_BF16),
        "held, hybrid": _experiment(**HELD, replicas=2),
        "held, hybrid, bf16": _experiment(**HELD, replicas=2, mp_policy=_BF16),
    }
    found = run_ranks(_different, list(cases.values()), world_size=4)[0]
    assert dict(zip(cases, found, strict=True)) == {name: [] for name in cases}


def _average(_state: object, gradient: torch.Tensor, output: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(output, gradient, op=dist.ReduceOp.AVG)


def _with_a_hook(model: nn.Module, fully_shard: Callable[..., nn.Module]) -> None:
    """A hook on the compiled side that does what FSDP2 does by itself."""
    for part in model.children():
        fully_shard(part)
    fully_shard(model)
    if fully_shard is fsdp_compile.fully_shard:
        fsdp_compile.register_comm_hook(model, _average)


@pytest.mark.long
def test_three_ranks_have_the_bits_of_fsdp2() -> None:
    planned = {"prefetch": "auto", "reduce_layout": "fsdp2", "bucket_mb": "auto"}
    cases = {
        "planned, bf16, held": _experiment(mp_policy=_BF16, options=planned, **HELD),
        "planned, a hook": _experiment(options=planned, prepare=_with_a_hook),
    }
    three = [dataclasses.replace(case, world_size=3) for case in cases.values()]
    found = run_ranks(_different, three, world_size=3)[0]
    assert dict(zip(cases, found, strict=True)) == {name: [] for name in cases}


def _scattered(share: int) -> torch.Tensor:
    """What a reduce-scatter makes of the same 64 numbers per rank, in a message with `share` numbers per rank.

    Returns:
        `[draws, 64]`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.randn(16, world, world, 64, generator=torch.Generator().manual_seed(0))[:, rank]
    padded = nn.functional.pad(numbers, [0, share - 64])
    reduced = torch.empty(16, share)
    for message, result in zip(padded, reduced, strict=True):
        dist.reduce_scatter_tensor(result, message.reshape(-1))
    return reduced[:, :64]


def _places_that_differ(share: int) -> list[int]:
    """Of the first 64 numbers of this rank's share, those whose sum has other bits than in a message of 64 each."""
    return (_scattered(share) != _scattered(64)).any(0).nonzero().flatten().tolist()


def test_gloo_adds_in_an_order_that_depends_on_the_place_unless_shares_are_even() -> None:
    assert run_ranks(_places_that_differ, 96, world_size=4) == [[], [], [], []]
    odd = run_ranks(_places_that_differ, 65, world_size=4)
    assert any(odd)
    assert all(place < 2 * 4 for places in odd for place in places)
    assert run_ranks(_places_that_differ, 65, world_size=2) == [[], []]
