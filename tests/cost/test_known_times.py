"""Times that are known better than by a formula: the user's estimate, and measured collectives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from benchmarks.hardware import MeasuredTimes, signature_of
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.compute import node_costs
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Device, MeasuredCollective, hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.hosts import GroupRanks
from tests.cost.graphs import Sketch
from tests.models.round_sizes import explained

aten = torch.ops.aten


def _graph() -> tuple[fx.Graph, fx.Node, fx.Node]:
    s = Sketch()
    x = s.input("x", 64, 64)
    y = s.call(aten.mm.default, x, x)
    z = s.call(aten.relu.default, y)
    return s.done(z).graph, y, z


def _times(device: Device, fusion: Fusion = Fusion.KERNELS) -> tuple[float, float]:
    graph, y, z = _graph()
    costs = node_costs(graph, dataclasses.replace(hardware(), device=device), plan_kernels(graph, fusion))
    return costs[y].time_us, costs[z].time_us


@pytest.mark.core
def test_the_users_estimate_comes_first_then_the_roofline() -> None:
    roofline = hardware().device
    _, y, z = _graph()
    times = {signature_of(y): 7.0, signature_of(z): 9.0}
    known = {fusion: dataclasses.replace(roofline, estimate=MeasuredTimes(times, fusion)) for fusion in Fusion}
    assert _times(known[Fusion.KERNELS]) == (7.0, _times(roofline)[1])  # what is fused was not measured by itself
    assert _times(known[Fusion.NONE], Fusion.NONE) == (7.0, 9.0)
    mine = dataclasses.replace(roofline, estimate=lambda node: 3.0 if node.target is aten.mm.default else None)
    assert _times(mine) == (3.0, _times(roofline)[1])


def test_a_signature_tells_shapes_layouts_and_dtypes_apart_and_nothing_else() -> None:
    _, y, z = _graph()
    _, again, _ = _graph()
    assert signature_of(y) == signature_of(again) != signature_of(z)
    s = Sketch()
    x = s.input("x", 64, 64)
    assert signature_of(s.call(aten.mm.default, x, s.call(aten.t.default, x))) != signature_of(y)
    half = s.input("half", 64, 64, dtype=torch.bfloat16)
    assert signature_of(s.call(aten.mm.default, half, half)) != signature_of(y)


def test_measured_collectives_are_interpolated_and_others_follow_the_formula() -> None:
    formula = hardware(link=50.0)
    table = MeasuredCollective("all-gather", 8, ((1e3, 20.0), (1e6, 120.0), (3e6, 320.0)))
    known = dataclasses.replace(formula, link=dataclasses.replace(formula.link, measured=(table,)))
    group = GroupRanks(8)
    gathered = [known.collective_us(Kind.GATHER.value, size, group) for size in (0, 1e3, 2e6, 3e6, 5e6)]
    assert gathered == pytest.approx([20.0, 20.0, 220.0, 320.0, 520.0])
    for kind, ranks in ((Kind.REDUCE, 8), (Kind.GATHER, 4)):
        other = GroupRanks(ranks)
        assert known.collective_us(kind.value, 1e6, other) == formula.collective_us(kind.value, 1e6, other)
    with pytest.raises(ConfigError, match="two or more sizes, growing"):
        MeasuredCollective("all-gather", 8, ((1e6, 20.0), (1e3, 120.0)))


def test_a_plan_takes_measured_collectives() -> None:
    table = [MeasuredCollective(kind.value, 4, ((0.0, 1e4), (1e12, 2e4))) for kind in (Kind.GATHER, Kind.REDUCE)]
    there = hardware(link=50.0)
    there = dataclasses.replace(there, link=dataclasses.replace(there.link, measured=tuple(table)))
    plan = explained(hardware=there)
    assert all(c.time_us == pytest.approx(1e4, rel=1e-3) for graph in plan.graphs for c in graph.collectives)
