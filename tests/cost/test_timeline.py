"""The time of kernels and of a step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from operator import getitem

import pytest
import torch
from torch import fx

from fsdp_compile.cost.compute import NodeCost, multiplied_dtype, node_costs
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import DEVICES, LINKS, hardware, make_link
from fsdp_compile.cost.timeline import Compute, Event, Start, Times, Wait, simulate
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import StepGraph
from tests.cost.graphs import Sketch


def test_a_gather_is_hidden_behind_compute_and_exposed_where_that_does_not_cover_it() -> None:
    hidden = simulate([Start("g", "link", 5.0), Compute("a", 8.0), Wait("w", "g"), Compute("b", 2.0)])
    assert hidden.transfers["g"] == Times(0.0, 0.0, 5.0, waited_us=8.0, exposed_us=0.0, computed_us=8.0)
    assert hidden.end_us == 10.0
    exposed = simulate([Compute("a", 1.0), Start("g", "link", 5.0), Compute("b", 2.0), Wait("w", "g")])
    assert exposed.transfers["g"] == Times(1.0, 1.0, 6.0, waited_us=3.0, exposed_us=3.0, computed_us=2.0)
    assert (exposed.exposed_us, exposed.compute_us, exposed.end_us) == (3.0, 3.0, 6.0)


def test_collectives_of_one_lane_queue_and_those_of_two_do_not() -> None:
    def ends(second_lane: str) -> tuple[float, float]:
        events: list[Event] = [Start("a", "one", 4.0), Start("b", second_lane, 3.0), Wait("wb", "b"), Wait("wa", "a")]
        timeline = simulate(events)
        return timeline.transfers["b"].queued_us, timeline.end_us

    assert ends("one") == (4.0, 7.0)
    assert ends("two") == (0.0, 4.0)


def test_lanes_of_one_link_share_it_while_both_send() -> None:
    events: list[Event] = [Start("a", "one", 4.0, "link"), Compute("c", 2.0), Start("b", "two", 3.0, "link")]
    timeline = simulate([*events, Wait("wa", "a"), Wait("wb", "b")])
    a, b = timeline.transfers["a"], timeline.transfers["b"]
    # From 2 on each has half of the link: 2 are left of a, and 1 of b is left once they are sent.
    assert (a.begin_us, a.end_us, a.exposed_us) == (0.0, 6.0, 4.0)
    assert (b.begin_us, b.end_us, b.queued_us, b.exposed_us) == (2.0, 7.0, 0.0, 1.0)
    assert timeline.busy_us == {"link": 7.0}
    assert timeline.end_us == 7.0


def test_a_link_is_never_idle_while_a_lane_has_something_to_send() -> None:
    works = {"one": [3.0, 1.0, 2.5], "two": [0.5, 4.0]}
    events: list[Event] = [
        Start((lane, index), lane, time_us, "link")
        for lane, times in works.items()
        for index, time_us in enumerate(times)
    ]
    timeline = simulate(events)
    assert timeline.end_us == pytest.approx(sum(sum(times) for times in works.values()))
    for lane, times in works.items():
        spans = [timeline.transfers[lane, index] for index in range(len(times))]
        assert all(before.end_us == after.begin_us for before, after in itertools.pairwise(spans))


def test_a_second_wait_for_the_same_collective_costs_nothing() -> None:
    timeline = simulate([Start("g", "link", 5.0), Wait("w1", "g"), Compute("a", 1.0), Wait("w2", "g")])
    transfer = timeline.transfers["g"]
    assert transfer.exposed_us == 5.0
    assert transfer.waited_us == 0.0
    assert timeline.reached_us["w2"] == 6.0


def test_a_collective_that_nobody_waits_for_still_ends_the_schedule() -> None:
    timeline = simulate([Start("r", "link", 9.0), Compute("a", 1.0)])
    assert timeline.transfers["r"].waited_us is None
    assert timeline.end_us == 9.0


aten = torch.ops.aten
HARDWARE = hardware("h100-sxm")
DEVICE = HARDWARE.device


def costs_of(step: StepGraph, fusion: Fusion = Fusion.NONE) -> dict[fx.Node, NodeCost]:
    return node_costs(step.graph, HARDWARE, plan_kernels(step.graph, fusion))


def test_a_matmul_costs_two_flops_per_product_at_the_rate_of_its_dtype() -> None:
    for dtype, tflops in ((torch.bfloat16, 989.4), (torch.float32, 66.9)):
        s = Sketch()
        x = s.input("x", 4096, 8192, dtype=dtype)
        w = s.input("w", 8192, 1024, dtype=dtype)
        y = s.call(aten.mm.default, x, w)
        cost = costs_of(s.done(y))[y]
        assert cost.flops == 2 * 4096 * 8192 * 1024
        assert cost.size_bytes == (4096 * 8192 + 8192 * 1024 + 4096 * 1024) * dtype.itemsize
        assert cost.time_us == pytest.approx(cost.flops / (tflops * 0.7 * 1e6))


def test_a_pointwise_operator_is_bound_by_memory() -> None:
    s = Sketch()
    x = s.input("x", 1024, 1024)
    y = s.call(aten.add.Tensor, x, x)
    cost = costs_of(s.done(y))[y]
    assert cost.size_bytes == 2 * 4 * 1024 * 1024  # read once, written once
    assert cost.time_us == pytest.approx(cost.size_bytes / (3.35e12 * 0.9) * 1e6)


def test_a_fused_kernel_reads_its_input_once_and_writes_what_leaves_it() -> None:
    s = Sketch()
    x = s.input("x", 1024, 1024)
    a = s.call(aten.relu.default, x)
    b = s.call(aten.mul.Tensor, a, x)
    c = s.call(aten.mm.default, b, x)
    piece = 4 * 1024 * 1024
    step = s.done(c)
    alone = costs_of(step)
    assert [alone[n].size_bytes for n in (a, b)] == [2 * piece, 3 * piece]
    fused = costs_of(step, Fusion.KERNELS)
    assert [fused[n].size_bytes for n in (a, b)] == [piece, piece]


def test_views_are_free_and_lookups_read_only_their_rows() -> None:
    s = Sketch()
    table = s.input("table", 100_000, 64)
    rows = s.input("rows", 10, dtype=torch.int64)
    found = s.call(aten.embedding.default, table, rows)
    turned = s.call(aten.t.default, found)
    costs = costs_of(s.done(turned))
    assert costs[turned].time_us == 0.0
    assert costs[found].size_bytes == 2 * 10 * 64 * 4 + 10 * 8


def test_a_causal_kernel_does_half_the_attention() -> None:
    flops = []
    for causal in (False, True):
        s = Sketch()
        q, k, v = (s.input(name, 1, 8, 512, 64) for name in "qkv")
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        both = s.call(op, q, k, v, 0.0, causal)
        flops.append(costs_of(s.done(both))[both].flops)
    assert flops == [2 * 2 * 8 * 512 * 512 * 64, 2 * 8 * 512 * 512 * 64]


def test_matmuls_are_of_the_dtype_of_their_factors() -> None:
    """Scales of 8-bit factors, and the logarithms that attention saves, are wider and come last."""
    s = Sketch()
    a, b = (s.input(name, 64, 64, dtype=torch.float8_e4m3fn) for name in "ab")
    scales = [s.input(name, 1) for name in ("scale_a", "scale_b")]
    eight = s.call(aten._scaled_mm.default, a, s.call(aten.t.default, b), *scales, None, None, torch.bfloat16)
    causal = True
    q, k, v = (s.input(name, 1, 8, 64, 64, dtype=torch.bfloat16) for name in "qkv")
    both = s.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v)
    out, logarithms = (s.call(getitem, both, index) for index in range(2))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    grads = s.call(backward, out, q, k, v, out, logarithms, 0.0, causal)
    costs = costs_of(s.done(grads))
    assert multiplied_dtype(eight) is torch.float8_e4m3fn
    assert costs[eight].flops == 2 * 64**3
    assert multiplied_dtype(grads) is torch.bfloat16


def test_an_unknown_dtype_takes_the_slowest_rate() -> None:
    assert DEVICE.flops_per_s(torch.int8) == DEVICE.flops_per_s(torch.float32)
    assert dataclasses.replace(DEVICE).flops_per_s(None) == DEVICE.flops_per_s(torch.float32)


def test_a_collective_takes_latency_and_bytes_over_bandwidth() -> None:
    # 10 us + 5 us * log2(8) + 45 MB at 45 GB/s
    took = make_link("a link", 50.0, "made up").formula_us(45e6, 8, 45e9)
    assert took == pytest.approx(10 + 15 + 1000)


def test_every_number_of_the_hardware_has_a_unit_and_a_source() -> None:
    devices, links = DEVICES.values(), (*LINKS.values(), *(device.near for device in DEVICES.values()))
    quantities = [quantity for device in devices for quantity in device.matmul.values()]
    quantities += [q for d in devices for q in (d.matmul_share, d.memory_rate, d.memory_share, d.memory)]
    quantities += [q for link in links for q in (link.rate, link.rate_share, link.launch, link.hop)]
    assert all(q.value > 0 and q.unit and q.source for q in quantities)
    assert "323 GB/s" in LINKS["ib-400"].rate_share.source


def test_unknown_hardware_is_refused_with_all_names() -> None:
    with pytest.raises(ConfigError, match=r"instead: one of .*h100-sxm"):
        hardware("h100")
    with pytest.raises(ConfigError, match="ib-400"):
        hardware(link="ib400")
    for nothing in (0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="GB/s"):
            hardware(link=nothing)
