"""What a plan says, against arithmetic on the shapes of the model."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.cost.memory import Holder
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.report import Exposure
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Stack, explained, on_meta

RANKS = 4
MATRIX, VECTOR = WIDTH * WIDTH, WIDTH
BLOCK = MATRIX + 2 * VECTOR
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return explained(Stack, RANKS, mp_policy=MIXED, bucket_mb=0)


def test_units_add_up_to_the_model(plan: Plan) -> None:
    assert [unit.name for unit in plan.units] == ["blocks.0", "blocks.1", "blocks.2"]
    for unit in plan.units:
        assert (unit.parameters, unit.numel) == (3, BLOCK)
        assert (unit.stored, unit.sent, unit.reduced) == (("float32",), ("bfloat16",), ("float32",))
        assert unit.full_bytes == 4 * BLOCK
        assert unit.shard_bytes == 4 * BLOCK // RANKS
        assert unit.padding_bytes == 0


def test_buckets_hold_each_parameter_once_in_the_layout_that_its_size_asks_for(plan: Plan) -> None:
    (forward,) = plan.forward
    gathers = [c for c in forward.collectives if c.kind is Kind.GATHER]
    assert [c.unit for c in gathers] == ["blocks.0", "blocks.1", "blocks.2"]
    for c in gathers:
        assert c.dtype == "bfloat16"
        assert c.size_bytes == 2 * BLOCK
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
        assert c.last_use is None
        assert c.reshard is None


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
    for graph in plan.graphs:
        for c in graph.collectives:
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
    for graph in plan.graphs:
        memory = graph.memory
        totals = [sum(column) for column in zip(*memory.live_bytes.values(), strict=True)]
        assert memory.peak_bytes == max(totals) == totals[memory.peak.index] == sum(memory.at_peak.values())
        assert memory.at_peak[Holder.SHARD] == 3 * 4 * BLOCK // RANKS
        assert all(a.size_bytes <= memory.peak_bytes for a in memory.largest)


def test_no_more_than_two_units_are_gathered_at_once_when_prefetching_one() -> None:
    (forward,) = explained(Stack, RANKS, mp_policy=MIXED, prefetch=1).forward
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
    other = explained(Stack, RANKS, hardware(link=gb_per_s), mp_policy=MIXED)
    assert (other.step_us < plan.step_us) is (gb_per_s > 50)
    for graph in other.graphs:
        for c in graph.collectives:
            assert (c.exposure is Exposure.HIDDEN) is (c.exposed_us < 1.0)
            assert c.reason


@pytest.mark.long
def test_the_machine_of_the_options_is_the_one_that_times_are_estimated_for(plan: Plan) -> None:
    slow = hardware(link=0.01)
    model, x = on_meta(Stack)
    in_options = explain(model, x, world_size=RANKS, options={"lower": "eager", "hardware": slow})
    assert in_options == explained(Stack, RANKS, slow)
    assert in_options.step_us > plan.step_us
    with pytest.raises(ConfigError, match="two machines"):
        explain(model, x, world_size=RANKS, options={"hardware": slow}, hardware=hardware(link=1.0))


def test_hybrid_sharding_reduces_over_replicas_too() -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("replicate", "shard"))
        plan = explained(Stack, None, mesh=mesh)
    reduced = [c for graph in plan.graphs for c in graph.collectives if c.kind is Kind.REPLICATE]
    assert {c.ranks for c in reduced} == {2}
    assert sum(c.size_bytes for c in reduced) == 3 * 4 * BLOCK // RANKS
    # An all-reduce of S bytes over 2 replicas sends 2 * S * 1/2.
    assert plan.volume.sent_bytes[Kind.REPLICATE] == pytest.approx(3 * 4 * BLOCK / RANKS)
    assert plan.volume.full_sharding_bytes == pytest.approx(12 * 3 * BLOCK * 3 / 4 + 3 * 4 * BLOCK / RANKS)
