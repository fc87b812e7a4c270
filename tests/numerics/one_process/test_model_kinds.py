"""Every kind of model trains to the numbers of one process on the whole batch, graphs run operator by operator."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fully_shard
from tests import long
from tests.models.kinds import KINDS, Slim, Stack
from tests.numerics.one_process.measure import Differences, train_pair
from tests.ranks import on_ranks, run_ranks

# float32 sums of at most a few hundred terms in another order; attention's keys have gradients near zero.
LOSS, GRADIENT, PARAMETER = 1e-6, 2e-5, 1e-3


def assert_equal_training(worst: list[Differences]) -> None:
    for found in worst:
        assert found.loss < LOSS
        assert found.gradient < GRADIENT
        assert found.parameter < PARAMETER


def _kind(name: str) -> Differences:
    return train_pair(KINDS[name], clip=0.5)


@pytest.mark.core
@long.parametrize("name", KINDS, always=["stack", "tied"])
def test_kind(name: str) -> None:
    assert_equal_training(run_ranks(_kind, name, world_size=2))


@long.parametrize("name", ["odd-shapes", "stack", "tied"], always=["odd-shapes"])
@long.parametrize("world_size", [1, 4], always=[1])
def test_world_sizes(name: str, world_size: int) -> None:
    assert_equal_training(run_ranks(_kind, name, world_size=world_size))


def _prefetch(distance: int) -> Differences:
    return train_pair(Slim, options={"prefetch": distance})


@long.parametrize("distance", [0, 2, 9], always=[2])
def test_prefetch_distance_changes_no_number(distance: int) -> None:
    assert_equal_training(run_ranks(_prefetch, distance))


@pytest.mark.long
@on_ranks()
def test_mixed_precision_policy() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    found = train_pair(Stack, prepare=lambda model: fully_shard(model, mp_policy=policy))
    assert found.loss < 2e-2
    assert found.gradient < 1e-1
