"""What each pass does not change: the graphs before and after it run to the same bits, or within the bound of a sum.

The markers of a captured graph gather and reduce by themselves, so graphs run after any number of passes.
"""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_compile.options import FSDPOptions
from fsdp_compile.parity.compare import Difference
from fsdp_compile.parity.experiment import Level, sgd
from fsdp_compile.parity.train import train_both
from fsdp_compile.pipeline import CAPTURE, passes
from tests.numerics.fsdp2.matrix import Combination
from tests.numerics.fsdp2.results import Judge
from tests.rank_worker import reset_torch
from tests.ranks import run_ranks

COMBINATIONS = [
    Combination("tied", "kept", "full", "bf16/fp32", "no accumulation", 2),
    Combination("repeated", "recomputed", "ZeRO-2", "fp32", "2 reduced", 2),
    Combination("frozen", "kept", "full", "fp32", "2 held", 2),
]
PARAMETERS = [
    pytest.param(one, id=one.key, marks=[pytest.mark.long] if one is not COMBINATIONS[0] else [])
    for one in COMBINATIONS
]
FIXED, PLANNED = FSDPOptions(prefetch=1), FSDPOptions(prefetch="auto")
READ_TWICE = ("tied", "repeated")
"""A marker reduces the gradient of its own read; the first pass adds those of one parameter before it reduces once."""
SECTION = "After every pass"


def _stops(options: FSDPOptions) -> list[str]:
    """Where graphs stop; a planned schedule's first pass is that of the fixed one."""
    names = [CAPTURE, *(one.name for one in passes(options))]
    return names if options == FIXED else names[2:]


def _key(one: Combination, options: FSDPOptions, stop: str) -> str:
    return f"prefetch={options.prefetch}, {stop}: {one.key}"


KEYS = [_key(one, options, stop) for options in (FIXED, PLANNED) for one in COMBINATIONS for stop in _stops(options)]
SECTIONS = {SECTION: KEYS}


def _train_after_each_pass(one: Combination, options: FSDPOptions) -> dict[str, list[Difference]]:
    """The same training with the graphs as they are before the first pass, after it, after the second, ..."""
    found = {}
    for stop in _stops(options):
        reset_torch()
        experiment = one.experiment(steps=2, prefetch=options.prefetch, stop_after=stop)
        if stop == CAPTURE and one.model in READ_TWICE:
            experiment = dataclasses.replace(experiment, level=Level.TOLERANCE, optimizer=sgd)
        found[stop] = train_both(experiment)
    return found


@pytest.mark.parametrize(
    "options",
    [FIXED, pytest.param(PLANNED, marks=pytest.mark.long)],
    ids=lambda options: f"prefetch={options.prefetch}",
)
@pytest.mark.parametrize("one", PARAMETERS)
def test_graphs_run_to_the_bits_of_fsdp2_after_every_pass(one: Combination, options: FSDPOptions, judge: Judge) -> None:
    by_stop = run_ranks(_train_after_each_pass, one, options, world_size=2)[0]
    assert list(by_stop) == _stops(options)
    for stop, found in by_stop.items():
        judge(SECTION, KEYS, _key(one, options, stop), found)
