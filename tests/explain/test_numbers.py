"""What a plan says, against arithmetic on the shapes of the model: collectives, memory, copies, offload."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_compile.cost.communicate import COPIES, Kind
from fsdp_compile.cost.copies import Way
from fsdp_compile.cost.hardware import Hardware, Quantity, hardware
from fsdp_compile.cost.memory import Holder
from fsdp_compile.errors import BudgetTooSmallError, ConfigError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.report import Exposure
from fsdp_compile.ir.graph import Phase
from fsdp_compile.training.model import Llama, ModelShape
from tests import long
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Broken, InARow, Stack, explained, on_meta

RANKS = 4
MATRIX, VECTOR = WIDTH * WIDTH, WIDTH
BLOCK = MATRIX + 2 * VECTOR
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return explained(mp_policy=MIXED, bucket_mb=0)


def test_units_add_up_to_the_model(plan: Plan) -> None:
    assert [unit.name for unit in plan.units] == ["blocks.0", "blocks.1", "blocks.2"]
    for unit in plan.units:
        assert (unit.parameters, unit.numel) == (3, BLOCK)
        assert (unit.stored, unit.sent, unit.reduced) == (("float32",), ("bfloat16",), ("float32",))
        assert (unit.full_bytes, unit.shard_bytes, unit.padding_bytes) == (4 * BLOCK, 4 * BLOCK // RANKS, 0)


def test_buckets_hold_each_parameter_once_in_the_layout_that_its_size_asks_for(plan: Plan) -> None:
    (forward,) = plan.forward
    gathers = [c for c in forward.collectives if c.kind is Kind.GATHER]
    assert [c.unit for c in gathers] == ["blocks.0", "blocks.1", "blocks.2"]
    for c in gathers:
        assert (c.dtype, c.size_bytes) == ("bfloat16", 2 * BLOCK)
        packed, own = c.messages
        assert (packed.size_bytes, own.size_bytes) == (2 * 2 * VECTOR, 2 * MATRIX)
        assert own.parameters == (f"{c.unit}.linear.weight",)
        assert set(packed.parameters) == {f"{c.unit}.norm.weight", f"{c.unit}.linear.bias"}


def test_reductions_travel_in_the_dtype_that_they_are_reduced_in(plan: Plan) -> None:
    (backward,) = plan.backward
    reductions = [c for c in backward.collectives if c.kind is Kind.REDUCE]
    assert sorted(c.unit for c in reductions) == ["blocks.0", "blocks.1", "blocks.2"]
    for c in reductions:
        assert (c.dtype, c.size_bytes, sum(m.size_bytes for m in c.messages)) == ("float32", 4 * BLOCK, 4 * BLOCK)
        assert c.last_use is c.reshard is None


def test_volume_is_counted_and_compared_with_the_least(plan: Plan) -> None:
    others = (RANKS - 1) / RANKS
    assert plan.volume.full_sharding_bytes == pytest.approx((2 * 2 + 4) * 3 * BLOCK * others)
    assert plan.volume.sent_bytes[Kind.REDUCE] == pytest.approx(4 * 3 * BLOCK * others)
    (backward,) = plan.backward
    # Biases are not needed to compute gradients; whatever backward gathers is counted in its own dtype.
    gathered = 2 * 3 * BLOCK + sum(c.size_bytes for c in backward.collectives if c.kind is Kind.GATHER)
    assert plan.volume.sent_bytes[Kind.GATHER] == pytest.approx(gathered * others)
    assert 0.9 < plan.volume.total_bytes / plan.volume.full_sharding_bytes <= 1.0


def test_places_are_in_the_order_of_a_life(plan: Plan) -> None:
    for c in (c for graph in plan.graphs for c in graph.collectives):
        assert c.wait is not None
        assert c.start.index < c.wait.index
        assert c.start.time_us <= c.wait.time_us
        if c.kind is Kind.GATHER:
            assert c.last_use is not None
            assert c.reshard is not None
            assert c.wait.index <= c.last_use.index < c.reshard.index


def test_a_step_is_compute_plus_what_is_exposed(plan: Plan) -> None:
    for graph in plan.graphs:
        assert graph.end_us == pytest.approx(graph.compute_us + graph.exposed_us)
        assert graph.exposed_us == pytest.approx(sum(c.exposed_us for c in graph.collectives))
        assert sum(span.end_us - span.begin_us for span in graph.spans) == pytest.approx(graph.compute_us)


def test_memory_at_the_peak_adds_up_and_names_who_holds_it(plan: Plan) -> None:
    for memory in (graph.memory for graph in plan.graphs):
        totals = [sum(column) for column in zip(*memory.live_bytes.values(), strict=True)]
        assert memory.peak_bytes == max(totals) == totals[memory.peak.index] == sum(memory.at_peak.values())
        assert memory.at_peak[Holder.SHARD] == 3 * 4 * BLOCK // RANKS
        assert all(a.size_bytes <= memory.peak_bytes for a in memory.largest)


def test_no_more_than_two_units_are_gathered_at_once_when_prefetching_one() -> None:
    (forward,) = explained(mp_policy=MIXED, prefetch=1).forward
    # Two units in bfloat16, and a copy of the one packed parameter that is read right then.
    assert max(forward.memory.live_bytes[Holder.UNSHARDED]) == 2 * 2 * BLOCK + 2 * VECTOR


def test_saved_activations_go_from_forward_to_backward(plan: Plan) -> None:
    (forward,), (backward,) = plan.forward, plan.backward
    saved = forward.memory.live_bytes[Holder.SAVED]
    assert saved[-1] == max(saved) == backward.memory.live_bytes[Holder.SAVED][0] > 0
    assert backward.memory.live_bytes[Holder.SAVED][-1] == 0
    gradients = backward.memory.live_bytes[Holder.SHARD_GRADIENT]
    assert gradients[-1] >= 3 * 4 * BLOCK // RANKS


@pytest.mark.parametrize("gb_per_s", [1e6, 0.01])
def test_a_faster_link_never_makes_a_step_slower(gb_per_s: float, plan: Plan) -> None:
    other = explained(hardware=hardware(link=gb_per_s), mp_policy=MIXED)
    assert (other.step_us < plan.step_us) is (gb_per_s > 50)
    for c in (c for graph in other.graphs for c in graph.collectives):
        assert (c.exposure is Exposure.HIDDEN) is (c.exposed_us < 1.0)
        assert c.reason


@pytest.mark.long
def test_the_machine_of_the_options_is_the_one_that_times_are_estimated_for(plan: Plan) -> None:
    slow = hardware(link=0.01)
    model, x = on_meta(Stack)
    in_options = explain(model, x, world_size=RANKS, options={"lower": "eager", "hardware": slow})
    assert in_options == explained(hardware=slow)
    assert in_options.step_us > plan.step_us
    with pytest.raises(ConfigError, match="two machines"):
        explain(model, x, world_size=RANKS, options={"hardware": slow}, hardware=hardware(link=1.0))


def test_hybrid_sharding_reduces_over_replicas_too() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("replicate", "shard"))
        plan = explained(world_size=None, mesh=mesh)
    reduced = [c for graph in plan.graphs for c in graph.collectives if c.kind is Kind.REPLICATE]
    assert {c.ranks for c in reduced} == {2}
    assert sum(c.size_bytes for c in reduced) == 3 * 4 * BLOCK // RANKS
    # An all-reduce of S bytes over 2 replicas sends 2 * S * 1/2.
    assert plan.volume.sent_bytes[Kind.REPLICATE] == pytest.approx(3 * 4 * BLOCK / RANKS)
    assert plan.volume.full_sharding_bytes == pytest.approx(12 * 3 * BLOCK * 3 / 4 + 3 * 4 * BLOCK / RANKS)


ROWS = 8192


class Tower(nn.Module):
    """Its backward reads no frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).requires_grad_(requires_grad=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(x))


def test_backward_runs_beside_the_shards_and_inputs_that_it_does_not_read() -> None:
    plan = explained(Tower, 2, x=ROWS)
    shards = sum(unit.shard_bytes for unit in plan.units)
    for graph in plan.graphs:
        assert set(graph.memory.live_bytes[Holder.SHARD]) == {shards}
        assert set(graph.memory.live_bytes[Holder.INPUT]) == {4 * ROWS * WIDTH}
    there = plan.at(world_size=4)
    assert max(there.backward[0].memory.live_bytes[Holder.SHARD]) == shards // 2


def test_a_budget_has_room_for_them() -> None:
    with pytest.raises(BudgetTooSmallError) as caught:
        explained(Tower, 2, x=8, memory_budget_gb=1e-9, activations="saved")
    least = caught.value.least_bytes
    plan = explained(Tower, 2, x=8, memory_budget_gb=least / 1e9, activations="saved")
    assert plan.backward[0].memory.peak_bytes == plan.peak_bytes
    assert plan.peak_bytes <= least
    assert plan.at(gb_per_s=1).peak_bytes <= least


class Whole(InARow):
    """As `Broken`, in one graph."""

    def __init__(self) -> None:
        super().__init__(block for half in (Stack(2), Stack(2)) for block in half.blocks)


def test_graphs_of_other_regions_are_in_memory() -> None:
    whole, broken = explained(Whole, 2, x=ROWS), explained(Broken, 2, x=ROWS)
    assert len(broken.forward) == 2
    assert broken.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.15)
    shards = sum(unit.shard_bytes for unit in broken.units)
    assert all(set(graph.memory.live_bytes[Holder.SHARD]) == {shards} for graph in broken.graphs)
    saved = [graph.memory.live_bytes[Holder.SAVED] for graph in broken.forward]
    assert saved[1][0] == saved[0][-1]
    last = broken.backward[-1]
    assert (last.phase, last.region) == (Phase.BACKWARD, 0)
    ended = broken.backward[0].memory.live_bytes[Holder.SHARD_GRADIENT][-1]
    assert last.memory.live_bytes[Holder.SHARD_GRADIENT][0] == ended > 0


DEPTH = 2


def _llama(**options: Any) -> Plan:
    """Units of this size would share collectives, which takes a copy of small parameters; larger ones do not."""
    torch.compiler.reset()
    shape = ModelShape(width=WIDTH, layers=DEPTH, heads=4, seq_len=64)
    tokens = torch.zeros(2, 64, dtype=torch.long)
    return explained(lambda: Llama(shape), x=tokens, **{"lower": "inductor", "bucket_mb": 0, **options})


def _copied(plan: Plan, *ways: Way) -> int:
    return sum(graph.copied_bytes[way] for graph in plan.graphs for way in ways)


@pytest.mark.long
@pytest.mark.core
def test_nothing_is_copied_around_gathers_and_no_matmul_weight_into_a_reduction() -> None:
    plan = _llama()
    assert _copied(plan, Way.INTO_GATHERS, Way.OUT_OF_GATHERS) == 0  # neither matmul weights nor the norms' scales
    into = [copy for graph in plan.graphs for copy in graph.copies if copy.way is Way.INTO_REDUCTIONS]
    assert all("norm" in name for copy in into for name in copy.parameters)
    # Per block, the gradient of one of two scales is there before the kernel runs that writes their message.
    assert sum(copy.size_bytes for copy in into) <= DEPTH * 4 * VECTOR


@pytest.mark.long
def test_a_share_of_the_gradients_is_put_together_unless_a_cast_does_it() -> None:
    plan = _llama()
    blocks = sum(unit.shard_bytes for unit in plan.units if unit.parameters > 1)
    assert _copied(plan, Way.OUT_OF_REDUCTIONS) == blocks
    cast = _llama(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert _copied(cast, Way.OUT_OF_REDUCTIONS) == 0  # what casts gradients to float32 writes them where they belong
    assert _copied(cast, Way.INTO_GATHERS, Way.OUT_OF_GATHERS) == 0


def test_the_packed_layout_copies_every_gradient_of_a_unit() -> None:
    plan = _llama(reduce_layout="fsdp2")
    several = [unit for unit in plan.units if unit.parameters > 1]
    packed = _copied(plan, Way.INTO_REDUCTIONS)
    assert packed >= sum(unit.full_bytes for unit in several) - DEPTH * 2 * 4 * VECTOR
    assert _copied(plan, Way.INTO_GATHERS, Way.OUT_OF_GATHERS) == 0


def _out_of_gathers(**options: Any) -> list[tuple[tuple[str, ...], int]]:
    plan = explained(lower="inductor", **options)
    copies = [copy for graph in plan.graphs for copy in graph.copies if copy.way is Way.OUT_OF_GATHERS]
    return [(copy.parameters, copy.size_bytes) for copy in copies]


def test_a_bias_that_a_matmul_reads_is_copied_out_of_its_message() -> None:
    assert _out_of_gathers(bucket_mb=0) == [((f"blocks.{i}.linear.bias",), 4 * VECTOR) for i in range(3)]


def test_units_that_share_a_message_have_small_parameters_copied_out_at_once() -> None:
    of_each = ("norm.weight", "linear.bias")
    together = [tuple(f"blocks.{i}.{name}" for i in range(3)) for name in of_each]
    copies = _out_of_gathers()  # those of forward first
    assert copies[:2] == [(names, 3 * 4 * VECTOR) for names in together]


def test_without_a_compiler_small_parameters_are_copied_and_matmul_weights_are_not() -> None:
    plan = explained(bucket_mb=0)
    assert _copied(plan, Way.INTO_GATHERS) == 0
    assert _copied(plan, Way.OUT_OF_GATHERS) == 3 * 2 * 4 * VECTOR
    assert _copied(plan, Way.INTO_REDUCTIONS) == 3 * 2 * 4 * VECTOR
    assert _copied(plan, Way.OUT_OF_REDUCTIONS) == 3 * (MATRIX + 2 * VECTOR) * 4 // 4
    assert re.search(r"forward +out of gathers +6\.14 kB +6\n", str(plan))
    (_, backward) = plan.to_dict()["graphs"]
    assert backward["copied_bytes"]["into reductions"] == 3 * 2 * 4 * VECTOR


BLOCKS = 3
SHARD = 4 * BLOCK // RANKS
"""Bytes of a block's parameters on one rank."""
READ_AGAIN = 4 * (MATRIX + VECTOR) // RANKS
"""Of those that backward reads: a bias is none of them."""


def _offloaded(policy: object = None, at: Hardware | None = None, **options: Any) -> Plan:
    return explained(hardware=at, offload_policy=policy or CPUOffloadPolicy(), **options)


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan]:
    """Without offload, and with it."""
    return explained(), _offloaded()


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
    plan = _offloaded(at=slow, prefetch=prefetch)
    assert plan.step_us > BLOCKS * (SHARD + READ_AGAIN)  # us: a byte takes one
    assert explained(hardware=slow, prefetch=prefetch).step_us < 0.01 * plan.step_us


@pytest.mark.long
def test_a_budget_that_shards_do_not_leave_room_in_is_kept_by_offloading_them(plans: tuple[Plan, Plan]) -> None:
    """Everything that a graph holds counts, and what is on the host is not held."""
    without, offloaded = plans
    plan = _offloaded(prefetch="auto", memory_budget_gb=offloaded.peak_bytes / 1e9)
    assert plan.peak_bytes <= offloaded.peak_bytes < without.peak_bytes


def test_the_report_shows_copies_and_the_memory_of_the_host(plans: tuple[Plan, Plan]) -> None:
    without, offloaded = plans
    assert [
        word for word in ("copy in", "copy out", "3 collectives, 6 copies", "host memory") if word not in str(offloaded)
    ] == []
    assert "host memory" not in str(without)
    assert offloaded.to_dict()["host_bytes"] == offloaded.host_bytes
    assert _offloaded(CPUOffload(offload_params=False)).host_bytes == 0
