"""What a plan says of offloaded units, against arithmetic on the shapes of the model."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

from fsdp_compile.cost.communicate import COPIES, Kind
from fsdp_compile.cost.hardware import Hardware, Quantity, hardware
from fsdp_compile.cost.memory import Holder
from fsdp_compile.explain.plan import Plan
from tests import long
from tests.models.round_sizes import WIDTH, Stack, explained

RANKS, BLOCKS = 4, 3
MATRIX, VECTOR = WIDTH * WIDTH, WIDTH
SHARD = 4 * (MATRIX + 2 * VECTOR) // RANKS
"""Bytes of a block's parameters on one rank."""
READ_AGAIN = 4 * (MATRIX + VECTOR) // RANKS
"""Of those that backward reads: a bias is none of them."""


def plan_of(policy: object = None, at: Hardware | None = None, **options: object) -> Plan:
    offload = {} if policy is None else {"offload_policy": policy}
    return explained(Stack, RANKS, at, **offload, **options)


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    return plan_of(), plan_of(CPUOffloadPolicy())


@pytest.mark.core
def test_shards_and_gradients_on_the_host_take_no_memory_of_the_device(plans: tuple[Plan, Plan]) -> None:
    without, offloaded = plans
    assert (without.host_bytes, offloaded.host_bytes) == (0, 2 * BLOCKS * SHARD)
    for graph, kept in zip(without.graphs, (BLOCKS * SHARD, 2 * BLOCKS * SHARD), strict=True):
        other = next(g for g in offloaded.graphs if g.phase is graph.phase)
        ends = [sum(live[-1] for live in g.memory.live_bytes.values()) for g in (graph, other)]
        assert ends[0] - ends[1] == kept, "parameters after forward, and their gradients besides after backward"
    (forward,) = without.forward
    assert set(forward.memory.live_bytes[Holder.SHARD]) == {BLOCKS * SHARD}
    (forward,) = offloaded.forward
    copies = forward.memory.live_bytes[Holder.SHARD]
    assert max(copies) == 3 * SHARD, "two that are sent, and one on the bus"
    assert copies[-1] == 0


def test_every_copy_is_counted_once_with_its_bytes_and_its_time_on_the_bus(plans: tuple[Plan, Plan]) -> None:
    without, offloaded = plans
    copies = [c for graph in offloaded.graphs for c in graph.collectives if c.kind in COPIES]
    assert not [c for graph in without.graphs for c in graph.collectives if c.kind in COPIES]
    sizes = {kind: sum(c.size_bytes for c in copies if c.kind is kind) for kind in COPIES}
    assert sizes == {Kind.COPY_IN: BLOCKS * (SHARD + READ_AGAIN), Kind.COPY_OUT: BLOCKS * SHARD}
    for copy in copies:
        assert copy.time_us == pytest.approx(10 + copy.size_bytes / (0.85 * 64e9) * 1e6)
    assert offloaded.volume == without.volume, "nothing more is sent to other ranks"
    there = offloaded.at(world_size=RANKS // 2)
    assert sum(c.size_bytes for g in there.graphs for c in g.collectives if c.kind in COPIES) == 2 * sum(sizes.values())


def test_both_directions_of_the_bus_and_the_link_are_lanes_of_their_own(plans: tuple[Plan, Plan]) -> None:
    (backward,) = plans[1].backward
    for lane in {c.group for c in backward.collectives}:
        mine = sorted((c.begin_us, c.end_us) for c in backward.collectives if c.group == lane)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(mine)), lane
    assert {c.group for c in backward.collectives} == {"fsdp.shard.0", "copy from the host", "copy to the host"}


@long.parametrize("prefetch", [1, "auto"], always=["auto"])
def test_a_slow_bus_makes_a_step_slow(prefetch: object) -> None:
    there = hardware()
    bus = dataclasses.replace(there.device.host, rate=Quantity(1e6 / 0.85, "byte/s", "a test"))
    slow = Hardware(dataclasses.replace(there.device, host=bus), there.link)
    plan = plan_of(CPUOffloadPolicy(), slow, prefetch=prefetch)
    assert plan.step_us > BLOCKS * (SHARD + READ_AGAIN)  # us: a byte takes one
    assert plan_of(None, slow, prefetch=prefetch).step_us < 0.01 * plan.step_us


@pytest.mark.long
def test_a_budget_that_shards_do_not_leave_room_in_is_kept_by_offloading_them() -> None:
    """Everything that a graph holds counts, and what is on the host is not held."""
    least = [plan_of(policy).peak_bytes for policy in (None, CPUOffloadPolicy())]
    budget_gb = least[1] / 1e9
    plan = plan_of(CPUOffloadPolicy(), prefetch="auto", memory_budget_gb=budget_gb)
    assert plan.peak_bytes <= least[1] < least[0]


def test_the_report_shows_copies_and_the_memory_of_the_host(plans: tuple[Plan, Plan]) -> None:
    text = str(plans[1])
    assert "copy in" in text
    assert "copy out" in text
    assert "3 collectives, 6 copies" in text
    assert "host memory" in text
    assert "host memory" not in str(plans[0])
    assert plans[1].to_dict()["host_bytes"] == plans[1].host_bytes
    assert plan_of(CPUOffload(offload_params=False)).host_bytes == 0
