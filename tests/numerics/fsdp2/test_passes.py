"""What each pass does not change: the graphs before and after it run to the same bits, or within the bound of a sum.

The markers of a captured graph gather and reduce by themselves, so graphs run after any number of passes.
"""

from __future__ import annotations

import dataclasses

from fsdp_compile.options import FSDPOptions
from fsdp_compile.parity.experiment import Experiment, Level, sgd
from fsdp_compile.parity.train import train_both
from fsdp_compile.pipeline import CAPTURE, passes
from tests import long
from tests.numerics.fsdp2.matrix import Combination
from tests.numerics.fsdp2.results import Judge
from tests.ranks import run_ranks

COMBINATIONS = [
    Combination("tied", "kept", "full", "bf16/fp32", "no accumulation", 2),
    Combination("repeated", "recomputed", "ZeRO-2", "fp32", "2 reduced", 2),
    Combination("frozen", "kept", "full", "fp32", "2 held", 2),
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


CASES = [(one, options, stop) for options in (FIXED, PLANNED) for one in COMBINATIONS for stop in _stops(options)]
KEYS = [_key(*case) for case in CASES]
ALWAYS = [(COMBINATIONS[0], FIXED, stop) for stop in _stops(FIXED)[:2]]
"""The graphs that autograd makes, and what gathers and reduces in them; later passes move that."""
SECTIONS = {SECTION: KEYS}


def _experiment(one: Combination, options: FSDPOptions, stop: str) -> Experiment:
    """A training with the graphs as they are before the first pass, or after one of them."""
    experiment = one.experiment(steps=2, prefetch=options.prefetch, stop_after=stop)
    if stop == CAPTURE and one.model in READ_TWICE:
        return dataclasses.replace(experiment, level=Level.TOLERANCE, optimizer=sgd)
    return experiment


@long.parametrize(("one", "options", "stop"), CASES, always=ALWAYS, ids=KEYS)
def test_graphs_run_to_the_bits_of_fsdp2_after_every_pass(
    one: Combination, options: FSDPOptions, stop: str, judge: Judge
) -> None:
    found = run_ranks(train_both, _experiment(one, options, stop), world_size=2)[0]
    judge(SECTION, KEYS, _key(one, options, stop), found)
