"""Combinations of model, strategy, precision, accumulation, recomputation and world size train like FSDP2 eager."""

from __future__ import annotations

import os

import pytest

from fsdp_compile.parity.train import train_both
from tests.numerics.fsdp2.matrix import Combination, covering, full_product
from tests.numerics.fsdp2.results import Judge
from tests.ranks import run_ranks

COVERING = covering()
ALWAYS = [next(one for one in COVERING if (one.world_size, one.precision) == (2, "bf16/fp32"))]
"""One that meets mixed precision; other values are left to CI, and every pair of them."""
REST = [one for one in full_product() if one not in COVERING] if "FSDP_COMPILE_FULL_MATRIX" in os.environ else []
INDUCTOR = [
    Combination("tied", "kept", "full", "bf16/fp32", "no accumulation", 2),
    Combination("uneven", "recomputed", "ZeRO-2", "fp32", "2 held", 2),
]
SECTIONS = {
    "Every pair of values, operator by operator": [one.key for one in COVERING],
    "Through Inductor": [one.key for one in INDUCTOR],
}
EAGER, COMPILED = SECTIONS


@pytest.mark.parametrize(
    "one", [pytest.param(one, id=one.key, marks=[] if one in ALWAYS else pytest.mark.long) for one in COVERING]
)
def test_every_pair_of_values_trains_like_fsdp2(one: Combination, judge: Judge) -> None:
    found = run_ranks(train_both, one.experiment(), world_size=one.world_size)[0]
    judge(EAGER, SECTIONS[EAGER], one.key, found)


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("one", INDUCTOR, ids=lambda one: one.key)
def test_inductor_trains_like_fsdp2_within_the_bounds(one: Combination, judge: Judge) -> None:
    found = run_ranks(train_both, one.experiment(lower="inductor"), world_size=one.world_size)[0]
    judge(COMPILED, SECTIONS[COMPILED], one.key, found)


@pytest.mark.optional
@pytest.mark.skipif(not REST, reason="FSDP_COMPILE_FULL_MATRIX=1 trains them all")
@pytest.mark.parametrize("one", [pytest.param(one, id=one.key) for one in REST])
def test_everything_with_everything_trains_like_fsdp2(one: Combination) -> None:
    found = run_ranks(train_both, one.experiment(), world_size=one.world_size)[0]
    assert found
    assert [difference for difference in found if difference.exceeds] == []
