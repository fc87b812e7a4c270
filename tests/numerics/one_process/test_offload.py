"""Offloaded units with everything else, on a machine whose copies are as late as they may be: equal to one process."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
from torch import nn

import fsdp_compile
from fsdp_compile import fully_shard
from tests import long
from tests.delayed_copies import ON_SUCH_A_HOST, delayed_copies
from tests.models.kinds import Slim, Stack
from tests.numerics.one_process.measure import Differences, gradient_difference, train_pair
from tests.numerics.one_process.strategies import PRECISIONS, STRATEGIES
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import WithOneProcess

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kept by neighbours": ("integer", "fp32", {}),
    "planned replicas, mixed precision": ("hybrid-zero2", "bf16", {"prefetch": "auto"}),
    "replicas alone, two buckets ahead": ("no-shard", "fp32", {"prefetch": 2}),
    "FSDP2's messages, nothing ahead": ("hybrid", "fp32", {"prefetch": 0, "reduce_layout": "fsdp2"}),
}
"""Strategy, precision and options."""


def _train(name: str) -> tuple[Differences, int]:
    strategy, precision, options = CASES[name]
    arguments = {**STRATEGIES[strategy](), "mp_policy": PRECISIONS[precision], "offload_policy": ON_SUCH_A_HOST}

    def prepare(model: nn.Module) -> None:
        fully_shard(model, **arguments)

    with delayed_copies() as copied:
        return train_pair(Slim, prepare=prepare, options=options, steps=2), len(copied)


@pytest.mark.long
@pytest.mark.core
@pytest.mark.parametrize(("strategy", "held"), [("full", "all"), ("hybrid", "replicas")])
@on_ranks(world_size=4)
def test_offloaded_gradients_that_are_held_back_equal_one_process(strategy: str, held: str) -> None:
    """Two backwards of which the first is held back: the largest difference of a gradient."""
    with delayed_copies() as copied:
        arguments = {**STRATEGIES[strategy](), "offload_policy": ON_SUCH_A_HOST}
        shard = functools.partial(fully_shard, **arguments)
        pair = WithOneProcess(lambda: Stack(1), shard=shard, shape=32, rows=4, twice=False)
        for step in range(2):
            if held == "replicas":
                pair.model.set_requires_all_reduce(step % 2 == 1)
            with fsdp_compile.no_sync(pair.model) if held == "all" and step % 2 == 0 else nullcontext():
                pair.backward()
    difference, copies = gradient_difference(*pair), len(copied)
    assert difference < 1e-5
    assert copies > 0


@pytest.mark.core
@long.parametrize("name", CASES, always=["planned replicas, mixed precision"])
def test_every_combination_equals_one_process(name: str) -> None:
    exact = CASES[name][1] == "fp32"
    for differences, copies in run_ranks(_train, name, world_size=4):
        assert differences.loss < (1e-6 if exact else 2e-2)
        assert differences.gradient < (2e-5 if exact else 1e-1)
        # Each unit goes in twice per step, and its gradients out once; kept parameters go in once.
        assert copies >= 2 * 3 * 2
