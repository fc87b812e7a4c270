"""The least time of a step, and what the planner hears of a link."""

from __future__ import annotations

import pytest

from benchmarks import bound, contenders, models
from benchmarks.bound import Held, Least, Sizes, bound_s, busy_s, least_bytes
from benchmarks.contenders import OURS, OURS_SHARDED, Setup
from benchmarks.hardware import plan_of, timed, told
from benchmarks.models import SMOKE, llama
from benchmarks.step_time import Computed, Emulated, held_of, shares
from fsdp_compile.layout.hosts import GroupRanks
from tests import long

SIZES = Sizes(all_bytes=100, input_bytes=10, block_bytes=15, root_bytes=40)


@pytest.mark.parametrize(
    ("held", "least"),
    [
        (Held.WHOLE, (0, 0, 0)),
        (Held.SUMMED, (0, 0, 200)),
        (Held.GATHERED, (10, 100, 100)),
        (Held.TWO, (10, 100, (90 - 30) + 100)),
        (Held.ROOT_AND_TWO, (10, 100, (90 - 70) + 100)),
        (Held.TWO_NO_INPUT, (0, 90, (90 - 30) + 90)),
    ],
)
def test_bytes_by_hand(held: Held, least: tuple[int, int, int]) -> None:
    """Before computing, until forward ends, and after that."""
    assert least_bytes(held, SIZES, ranks=4) == Least(*(part * 3 / 4 for part in least))
    assert least_bytes(held, SIZES, ranks=1).total == 0


def test_times_by_hand() -> None:
    assert busy_s(10.0, 300.0, 20.0) == 15.0
    assert bound_s(10.0, 1.0, Least(60.0, 60.0, 40.0), 20.0) == 10 + 3
    assert bound_s(10.0, 1.0, Least(60.0, 100.0, 200.0), 20.0) == 15 + 1


def test_shares_are_of_each_round() -> None:
    network = Emulated(SIZES, ranks=4, bytes_per_s=30.0)
    computed = Computed([10.0, 20.0, 20.0], [1.0, 1.0, 1.0])
    found = shares(Held.TWO, network, computed, [20.0, 40.0, 20.0], {"total_sent_bytes": 240.0})
    assert (found["busy_s"], found["share_of_busy"]) == (20.0, 0.5)
    assert (found["bound_s"], found["share_of_bound"]) == (20.25, 10.25 / 20)
    assert shares(Held.TWO, network, Computed([10.0], [1.0]), [], {}) == {}
    assert "bound_s" not in shares(None, network, Computed([10.0], [1.0]), [20.0], {"total_sent_bytes": 0.0})


def test_options_that_change_what_is_held_leave_no_bound() -> None:
    block = llama(SMOKE).block
    assert held_of(OURS, Setup(block, options={"lower": "eager"})) is Held.TWO
    assert held_of(OURS, Setup(block, options={"memory_budget_gb": 1.0})) is None
    assert held_of(contenders.FSDP2, Setup(block, options={"memory_budget_gb": 1.0})) is Held.ROOT_AND_TWO


@long.parametrize("contender", [OURS, OURS_SHARDED], always=[])
def test_our_plans_hold_what_is_said_of_them(contender: contenders.Contender) -> None:
    """And send no less than the bound allows, on a slow link, where all is kept that the plan has room for."""
    task = models.llama(models.LlamaSize(**{**vars(SMOKE), "layers": 3, "vocabulary": 1024}), device="meta")
    sizes = bound.sizes_of(task)
    assert sizes.root_bytes == sizes.all_bytes - 3 * sizes.block_bytes
    embedding = {"embedding": "sharded"} if contender is OURS_SHARDED else {}
    setup = told(Setup(task.block, options={"lower": "eager", "bucket_mb": 0, **embedding}), 1e6, 0.0)
    plan = plan_of(task, setup, ranks=8)
    exchanged = sum(size for kind, size in plan.volume.sent_bytes.items() if kind.value == "row exchange")
    least = least_bytes(contender.held, sizes, 8, exchanged).total
    assert 0.8 * plan.volume.total_bytes < least <= plan.volume.total_bytes


@pytest.mark.long
def test_the_planner_hears_of_the_link_and_of_measured_operators() -> None:
    task = models.llama(models.SMOKE)
    informed = told(Setup(task.block), bytes_per_s=1e6, latency_us=50.0)
    given = informed.options["hardware"]
    link = given.link
    assert given.collective_us("all-gather", 1e6, GroupRanks(8)) == 1e6 + 50.0
    known = timed(task, informed, ranks=8).options["hardware"]
    assert known.link == link
    assert known.device.estimate.times
    assert plan_of(task, informed, ranks=8).hardware.link == link


def test_a_fixed_distance_is_told_nothing() -> None:
    task = models.llama(models.SMOKE)
    fixed = Setup(task.block, options={"prefetch": 2})
    assert timed(task, told(fixed, bytes_per_s=1e6, latency_us=50.0), ranks=8) == fixed
