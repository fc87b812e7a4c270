"""Drawn models with drawn options train like one unsharded process."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, find, given, settings

from fsdp_compile.parity.train import train_both
from tests.numerics.one_process.drawn import WORLD_SIZE, Drawn, Layer, drawn
from tests.ranks import run_ranks

LONG = os.environ.get("FSDP_COMPILE_LONG", "") not in ("", "0")


@settings(max_examples=8 if LONG else 2, suppress_health_check=[HealthCheck.too_slow])
@given(drawn())
def test_a_drawn_model_trains_like_one_process(one: Drawn) -> None:
    found = run_ranks(train_both, one.experiment(), world_size=WORLD_SIZE)[0]
    assert found
    assert [difference for difference in found if difference.exceeds] == []


def test_failures_shrink_to_a_model_that_can_be_read() -> None:
    smallest = find(drawn(), lambda one: one.layers.count(Layer.TIED) > 1 and one.precision != "fp32")
    assert repr(smallest) == "[tied tied] full, bf16/fp32, no accumulation, prefetch 1, units chosen"
