"""Reports price each process group on its own link, in every world, and say where each number is from."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import MixedPrecision
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import Hardware, hardware
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.tables import page
from fsdp_compile.ir.graph import Phase
from fsdp_compile.planner.from_graph import outline
from tests.fake_world import fake_world
from tests.models.round_sizes import Stack, explained

THERE = hardware("h100-sxm", "ib-400", ranks_per_host=8)
WHOLE_GB_PER_S = 323.0
"""Of a ring over whole hosts, as reported."""


def _plan(world_size: int, there: Hardware | None = THERE, **options: Any) -> Plan:
    return explained(Stack, world_size, there, **options)


def _links(plan: Plan, phase: Phase, kind: Kind) -> set[tuple[str, int, float]]:
    """Link, ranks and GB/s of some collectives."""
    return {
        (c.link, c.ranks, round(c.bytes_per_s / 1e9, 3))
        for graph in plan.graphs
        for c in graph.collectives
        if graph.phase is phase and c.kind is kind
    }


@pytest.mark.core
def test_shards_inside_a_host_and_replicas_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    plan = _plan(32, None, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    for kind in (Kind.GATHER, Kind.REDUCE):
        assert _links(plan, Phase.BACKWARD, kind) == {("nvlink4", 8, 405.0)}
    assert _links(plan, Phase.BACKWARD, Kind.REPLICATE) == {("ib-400", 4, WHOLE_GB_PER_S / 8)}
    assert plan.links == "nvlink4, ib-400"
    assert "ib-400" in str(plan).split("backward:")[1].split("peak")[0]


@pytest.mark.parametrize(("per_host", "kept_on"), [(8, ("nvlink4", 4, 405.0)), (2, ("ib-400", 4, WHOLE_GB_PER_S / 4))])
def test_post_forward_shards_are_gathered_on_the_link_of_their_group(
    per_host: int, kept_on: tuple[str, int, float]
) -> None:
    there = hardware("h100-sxm", "ib-400", ranks_per_host=per_host)
    plan = _plan(16, there, reshard_after_forward=4)
    whole = ("ib-400", 16, WHOLE_GB_PER_S * per_host / 8)
    assert {link[:2] for link in _links(plan, Phase.FORWARD, Kind.GATHER)} == {whole[:2]}
    assert _links(plan, Phase.FORWARD, Kind.GATHER) == {(*whole[:2], round(whole[2], 3))}
    assert kept_on in _links(plan, Phase.BACKWARD, Kind.GATHER)


def test_a_plan_of_another_world_takes_the_links_of_that_world() -> None:
    plan = _plan(8)
    assert _links(plan, Phase.FORWARD, Kind.GATHER) == {("nvlink4", 8, 405.0)}
    there = plan.at(world_size=64)
    assert _links(there, Phase.FORWARD, Kind.GATHER) == {("ib-400", 64, WHOLE_GB_PER_S)}
    assert there == _plan(64)
    assert there.at(world_size=8) == plan
    assert _links(plan.at(world_size=64, gb_per_s=5.0), Phase.FORWARD, Kind.GATHER) == {("5 GB/s", 64, 4.5)}


def test_plans_before_the_passes_price_replicas_on_their_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    plan = _plan(32, THERE, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert plan.traced is not None
    _, backward = plan.traced.regions[0].captured
    problem = outline(backward, THERE, Fusion.NONE, everything=False)
    for reduction in problem.reductions:
        over_shards = 10 + 5 * 3 + reduction.size_bytes * (7 / 8) / 405e3
        over_replicas = 10 + 5 * 2 + 2 * (reduction.size_bytes / 8) * (3 / 4) / (WHOLE_GB_PER_S / 8 * 1e3)
        assert reduction.stages_us == pytest.approx((over_shards, over_replicas))


def test_every_number_is_shown_with_its_source() -> None:
    plan = _plan(64)
    numbers = {(n.of, n.what): n for n in plan.numbers}
    assert numbers["ib-400", "share of that"].source.startswith("323 GB/s")
    assert numbers["ib-400", "ring of 64 ranks"].value == pytest.approx(WHOLE_GB_PER_S * 1e9)
    assert numbers["h100-sxm", "memory rate"].source.startswith("NVIDIA H100 data sheet")
    assert not any(of == "nvlink4" for of, _ in numbers)  # nothing is sent on it
    text = " ".join(str(plan).split())
    for number in plan.numbers:
        assert number.source
        assert number.source.split(";")[0].split(",")[0] in text
    assert plan.to_dict()["numbers"] == json.loads(json.dumps(plan.to_dict()["numbers"]))
    assert "323 GB/s all-gather bus bandwidth" in page(plan)


def test_tensor_parallel_neighbours_lie_between_the_ranks_of_a_shard_group() -> None:
    """Two ranks of eight on a host are of one shard group, the others of groups beside it."""
    with fake_world(16):
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(32, 32))
        plan = explain(model, torch.zeros(4, 32), options={"lower": "eager", "mesh": mesh["dp"]}, hardware=THERE)
    assert _links(plan, Phase.FORWARD, Kind.GATHER) == {("ib-400", 4, WHOLE_GB_PER_S / 4)}


def test_plans_before_the_passes_count_low_bit_messages_and_whole_parameters() -> None:
    found = []
    for sent in (None, "nvfp4"):
        traced = _plan(8, mp_policy=MixedPrecision(torch.bfloat16, gather_dtype=sent)).traced
        assert traced is not None
        found.append(outline(traced.regions[0].captured[0], THERE, Fusion.NONE, everything=False).gathers)
    for mine, sent_low in zip(*found, strict=True):
        assert mine.size_bytes == pytest.approx(sent_low.size_bytes, rel=0.05), "full parameters are in memory"
        started_us = 10 + 5 * 3
        # 4.5 of 16 bits; small parameters are sent whole, and padded.
        assert 4.5 / 16 < (sent_low.time_us - started_us) / (mine.time_us - started_us) < 0.35
