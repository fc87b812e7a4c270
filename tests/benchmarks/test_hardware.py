"""What the benchmarks tell our planner of the machine."""

from __future__ import annotations

import pytest

from benchmarks import models
from benchmarks.contenders import Setup
from benchmarks.hardware import plan_of, timed, told
from fsdp_compile.layout.hosts import GroupRanks


@pytest.mark.long
def test_the_planner_hears_of_the_link_and_of_measured_operators() -> None:
    task = models.llama(models.SMOKE)
    informed = told(Setup(task.block), bytes_per_s=1e6, latency_us=50.0)
    given = informed.options["hardware"]
    link = given.link
    assert given.collective_us("all-gather", 1e6, GroupRanks(8)) == 1e6 + 50.0
    known = timed(task, informed, ranks=8).options["hardware"]
    assert known.link == link
    assert known.device.measured
    assert plan_of(task, informed, ranks=8).hardware.link == link


def test_a_fixed_distance_is_told_nothing() -> None:
    task = models.llama(models.SMOKE)
    fixed = Setup(task.block, options={"prefetch": 2})
    assert timed(task, told(fixed, bytes_per_s=1e6, latency_us=50.0), ranks=8) == fixed
