"""Live bytes of graphs written by hand, counted by hand. One row of 256 float32 is 1 kB (1024 byte)."""

from __future__ import annotations

from operator import getitem

import torch

from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.memory import Holder, Memory, memory_of
from fsdp_compile.ir.graph import StepGraph
from tests.cost.graphs import Sketch

aten = torch.ops.aten
KB = 1024


def _memory(step: StepGraph, fusion: Fusion = Fusion.NONE) -> Memory:
    return memory_of(step, plan_kernels(step.graph, fusion))


def test_a_value_lives_from_its_node_to_its_last_use() -> None:
    s = Sketch()
    x = s.input("x", 256, 256)
    w = s.input("w", 256, 256)
    a = s.call(aten.mm.default, x, w)
    b = s.call(aten.mm.default, a, w)
    c = s.call(aten.mm.default, b, w)
    memory = _memory(s.done(c))
    piece = 256 * KB
    assert memory.live_bytes([Holder.INPUT]) == [2 * piece] * 6
    # a is alone, then beside b; b beside c, which is returned and so an output from its first node on.
    assert memory.live_bytes([Holder.TEMPORARY]) == [0, 0, piece, 2 * piece, piece, 0]
    assert memory.live_bytes([Holder.OUTPUT]) == [0, 0, 0, 0, piece, piece]


def test_views_keep_the_memory_that_they_show() -> None:
    s = Sketch()
    x = s.input("x", 4, 256)
    a = s.call(aten.mm.default, x, s.input("w", 256, 256))
    t = s.call(aten.t.default, a)
    v = s.call(aten.view.default, s.call(aten.t.default, t), [256, 4])
    last = s.call(aten.mm.default, v, x)
    memory = _memory(s.done(last))
    (shown,) = [b for b in memory.buffers if b.node is a]
    names = [n.name for n in s.graph.nodes]
    assert shown.last == names.index(last.name)
    assert [b.node for b in memory.buffers if b.holder is Holder.TEMPORARY] == [a]


def test_a_table_lives_until_rows_are_taken_out_of_it() -> None:
    s = Sketch()
    rows, w = s.input("rows", 4, dtype=torch.int64), s.input("w", 256, 256)
    table = s.call(aten.mm.default, w, w)
    taken = s.call(aten.embedding.default, s.call(aten.view.default, table, [256, 256]), rows)
    again = s.call(aten.add.Tensor, s.call(aten.mm.default, s.call(aten.sin.default, taken), w), taken)
    memory = _memory(s.done(s.call(aten.mm.default, again, w)), Fusion.KERNELS)
    names = [n.name for n in s.graph.nodes]
    ends = {b.node: names[b.last] for b in memory.buffers}
    assert (ends[table], ends[taken]) == (taken.name, again.name)


def test_rows_are_taken_out_of_what_is_not_in_memory_by_whoever_computes_it() -> None:
    s = Sketch()
    w = s.input("w", 256, 256)
    scaled = s.call(aten.mul.Tensor, w, w)
    taken = s.call(aten.embedding.default, scaled, s.input("rows", 4, dtype=torch.int64))
    memory = _memory(s.done(s.call(aten.sin.default, taken)), Fusion.KERNELS)
    assert not {scaled, taken} & {b.node for b in memory.buffers}


def test_a_result_that_nobody_wants_keeps_its_number() -> None:
    s = Sketch()
    x, mean, rstd, weight = s.input("x", 256, 256), s.input("mean", 256, 1), s.input("rstd", 256, 1), s.input("w", 256)
    wanted = [False, True, True]
    gradients = s.call(aten.native_layer_norm_backward.default, x, x, [256], mean, rstd, weight, weight, wanted)
    bias = s.call(getitem, gradients, 2)
    memory = _memory(s.done(s.call(aten.add.Tensor, bias, weight)))
    assert [(b.size_bytes, b.last - b.first) for b in memory.buffers if b.node is gradients] == [(KB, 1), (KB, 2)]


def test_several_results_are_freed_one_by_one() -> None:
    s = Sketch()
    x = s.input("x", 256, 256)
    both = s.call(aten.var_mean.correction, x, [1])
    variance = s.call(getitem, both, 0)
    mean = s.call(getitem, both, 1)
    a = s.call(aten.mv.default, x, variance)
    b = s.call(aten.mv.default, x, mean)
    memory = _memory(s.done(s.call(aten.add.Tensor, a, b)))
    spans = [(buffer.first, buffer.last) for buffer in memory.buffers if buffer.node is both]
    assert spans == [(1, 4), (1, 5)]
    assert sum(buffer.size_bytes for buffer in memory.buffers if buffer.node is both) == 2 * KB


def test_what_stays_inside_a_kernel_takes_no_memory_but_keeps_what_it_reads() -> None:
    s = Sketch()
    x = s.input("x", 256, 256)
    a = s.call(aten.mm.default, x, x)
    inner = s.call(aten.relu.default, a)
    outer = s.call(aten.mul.Tensor, inner, 2.0)
    last = s.call(aten.mm.default, outer, x)
    step = s.done(last)
    piece = 256 * KB
    assert _memory(step).live_bytes([Holder.TEMPORARY]) == [0, piece, 2 * piece, 2 * piece, piece, 0]
    fused = _memory(step, Fusion.KERNELS)
    # relu is never written; the product is read until mul, which reads it in relu's place.
    assert fused.live_bytes([Holder.TEMPORARY]) == [0, piece, piece, 2 * piece, piece, 0]


def test_a_kernel_runs_where_its_result_is_needed_and_holds_what_it_reads_until_then() -> None:
    s = Sketch()
    x = s.input("x", 256, 256)
    a = s.call(aten.mm.default, x, x)
    late = s.call(aten.relu.default, a)
    b = s.call(aten.mm.default, x, x)
    step = s.done(s.call(aten.mm.default, late, b))
    piece = 256 * KB
    assert _memory(step).live_bytes([Holder.TEMPORARY]) == [0, piece, 2 * piece, 2 * piece, 2 * piece, 0]
    # relu runs after the second product, right before what reads it: until then the first product is there instead.
    assert plan_kernels(step.graph, Fusion.KERNELS).forced == {late: step.output.all_input_nodes[0]}
    assert _memory(step, Fusion.KERNELS).live_bytes([Holder.TEMPORARY]) == [0, piece, piece, 3 * piece, 2 * piece, 0]


def test_a_kernel_that_goes_on_with_its_reader_runs_in_its_place() -> None:
    s = Sketch()
    x = s.input("x", 256, 256)
    a = s.call(aten.relu.default, s.call(aten.mm.default, x, x))
    b = s.call(aten.mm.default, a, x)
    step = s.done(s.call(aten.add.Tensor, b, a))
    assert a not in plan_kernels(step.graph, Fusion.KERNELS).forced


def test_a_value_that_is_used_in_another_kernel_is_written() -> None:
    s = Sketch()
    x = s.input("x", 256, 256)
    a = s.call(aten.relu.default, x)
    b = s.call(aten.mul.Tensor, a, 2.0)
    c = s.call(aten.mm.default, b, x)
    d = s.call(aten.add.Tensor, c, a)
    kernels = plan_kernels(s.done(d).graph, Fusion.KERNELS)
    assert kernels.inner == frozenset()
    assert kernels.of[a] == kernels.of[b] != kernels.of[d]
