"""Offloaded units with everything else, on a machine whose copies are as late as they may be: equal to one process."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from fsdp_compile import fully_shard
from tests import long
from tests.delayed_copies import ON_SUCH_A_HOST, delayed_copies
from tests.models.kinds import Slim, Stack
from tests.numerics.one_process.measure import Differences, gradient_difference, train_pair
from tests.numerics.one_process.strategies import PRECISIONS, STRATEGIES
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kept by neighbours": ("integer", "fp32", {}),
    "planned replicas, mixed precision": ("hybrid-zero2", "bf16", {"prefetch": "auto"}),
    "replicas alone, two buckets ahead": ("no-shard", "fp32", {"prefetch": 2}),
    "FSDP2's messages, nothing ahead": ("hybrid", "fp32", {"prefetch": 0, "reduce_layout": "fsdp2"}),
}
"""Strategy, precision and options."""


@pytest.mark.long
@pytest.mark.core
@pytest.mark.parametrize("strategy", ["full", "hybrid"])
@on_ranks(world_size=4)
def test_offloaded_gradients_that_are_held_back_equal_one_process(strategy: str) -> None:
    """Two backwards of which the first is held back, or not averaged over replicas."""
    with delayed_copies() as copied:
        shard = functools.partial(fully_shard, **STRATEGIES[strategy](), offload_policy=ON_SUCH_A_HOST)
        pair = WithOneProcess(lambda: Stack(1), shard=shard, shape=32, rows=4, twice=False)
        for is_last in (False, True):
            if strategy == "full":
                pair.model.set_requires_gradient_sync(is_last)
            else:
                pair.model.set_requires_all_reduce(is_last)
            pair.backward()
    assert gradient_difference(*pair) < 1e-5
    assert copied


@pytest.mark.core
@long.parametrize("name", CASES, always=["planned replicas, mixed precision"])
@on_ranks(world_size=4)
def test_every_combination_equals_one_process(name: str) -> None:
    strategy, precision, options = CASES[name]
    arguments = {**STRATEGIES[strategy](), "mp_policy": PRECISIONS[precision], "offload_policy": ON_SUCH_A_HOST}
    within = Differences(1e-6, 2e-5, math.inf) if precision == "fp32" else Differences(2e-2, 1e-1, math.inf)
    with delayed_copies() as copied:
        train_pair(Slim, prepare=functools.partial(fully_shard, **arguments), options=options, steps=2, within=within)
    # Each unit goes in twice per step, and its gradients out once; kept parameters go in once.
    assert len(copied) >= 2 * 3 * 2
