"""FLOPs and bytes of nodes, by arithmetic."""

from __future__ import annotations

import dataclasses
from operator import getitem

import pytest
import torch

from fsdp_compile.cost.compute import node_costs, node_work
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import hardware
from tests.cost.graphs import Sketch

aten = torch.ops.aten
HARDWARE = hardware("h100-sxm")
DEVICE = HARDWARE.device


def test_a_matmul_costs_two_flops_per_product_at_the_rate_of_its_dtype() -> None:
    for dtype, tflops in ((torch.bfloat16, 989.4), (torch.float32, 66.9)):
        s = Sketch()
        x = s.input("x", 4096, 8192, dtype=dtype)
        w = s.input("w", 8192, 1024, dtype=dtype)
        y = s.call(aten.mm.default, x, w)
        cost = node_costs(s.done(y).graph, HARDWARE, plan_kernels(s.graph, Fusion.NONE))[y]
        assert cost.flops == 2 * 4096 * 8192 * 1024
        assert cost.size_bytes == (4096 * 8192 + 8192 * 1024 + 4096 * 1024) * dtype.itemsize
        assert cost.time_us == pytest.approx(cost.flops / (tflops * 0.7 * 1e6))


def test_a_pointwise_operator_is_bound_by_memory() -> None:
    s = Sketch()
    x = s.input("x", 1024, 1024)
    y = s.call(aten.add.Tensor, x, x)
    cost = node_costs(s.done(y).graph, HARDWARE, plan_kernels(s.graph, Fusion.NONE))[y]
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
    alone = node_costs(step.graph, HARDWARE, plan_kernels(step.graph, Fusion.NONE))
    assert [alone[n].size_bytes for n in (a, b)] == [2 * piece, 3 * piece]
    fused = node_costs(step.graph, HARDWARE, plan_kernels(step.graph, Fusion.KERNELS))
    assert [fused[n].size_bytes for n in (a, b)] == [piece, piece]


def test_views_are_free_and_lookups_read_only_their_rows() -> None:
    s = Sketch()
    table = s.input("table", 100_000, 64)
    rows = s.input("rows", 10, dtype=torch.int64)
    found = s.call(aten.embedding.default, table, rows)
    turned = s.call(aten.t.default, found)
    costs = node_costs(s.done(turned).graph, HARDWARE, plan_kernels(s.graph, Fusion.NONE))
    assert costs[turned].time_us == 0.0
    assert costs[found].size_bytes == 2 * 10 * 64 * 4 + 10 * 8


def test_a_causal_kernel_does_half_the_attention() -> None:
    flops = []
    for causal in (False, True):
        s = Sketch()
        q, k, v = (s.input(name, 1, 8, 512, 64) for name in "qkv")
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        both = s.call(op, q, k, v, 0.0, causal)
        flops.append(node_costs(s.done(both).graph, HARDWARE, plan_kernels(s.graph, Fusion.NONE))[both].flops)
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
    work = node_work(s.done(grads).graph, plan_kernels(s.graph, Fusion.NONE))
    assert work[eight].dtype is torch.float8_e4m3fn
    assert work[eight].flops == 2 * 64**3
    assert work[grads].dtype is torch.bfloat16


def test_an_unknown_dtype_takes_the_slowest_rate() -> None:
    assert DEVICE.flops_per_s(torch.int8) == DEVICE.flops_per_s(torch.float32)
    assert dataclasses.replace(DEVICE).flops_per_s(None) == DEVICE.flops_per_s(torch.float32)
