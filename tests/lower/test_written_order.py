"""The order of communication is read from Inductor's code and compared with the graph's."""

from __future__ import annotations

import re
from operator import getitem

import pytest
import torch
from torch import fx

from fsdp_compile.errors import ConfigError, InvariantError
from fsdp_compile.lower.written_order import compare, planned_calls

collectives = torch.ops._c10d_functional
aten = torch.ops.aten


def _planned() -> fx.Graph:
    """Two gathers, one of two messages; a matmul between their waits; a reduction in place."""
    graph = fx.Graph()
    x, a, b, c = (graph.placeholder(name) for name in "xabc")
    grouped = graph.call_function(collectives.all_gather_into_tensor_coalesced.default, ([a, b], 2, "shard"))
    items = [graph.call_function(getitem, (grouped, i)) for i in range(2)]
    single = graph.call_function(collectives.all_gather_into_tensor.default, (c, 2, "shard"))
    waits = [graph.call_function(collectives.wait_tensor.default, (item,)) for item in items]
    y = graph.call_function(aten.mm.default, (x, waits[0]))
    last = graph.call_function(collectives.wait_tensor.default, (single,))
    z = graph.call_function(aten.mm.default, (y, last))
    z = graph.call_function(aten.add.Tensor, (z, waits[1]))
    summed = graph.call_function(collectives.all_reduce.default, (z, "avg", "replicate"))
    graph.output(graph.call_function(collectives.wait_tensor.default, (summed,)))
    return graph


WRITTEN = """
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*'], r'''
    torch.ops._c10d_functional.wait_tensor.default(buf1)
''')

class Runner:
    def call(self, args):
        x, a, b, c = args
        # Topologically Sorted Source Nodes: [], Original ATen: []
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([a, b], 2, 'shard')
        buf1 = buf0[0]
        buf2 = buf0[1]
        del buf0
        buf3 = torch.ops._c10d_functional.all_gather_into_tensor.default(reinterpret_tensor(c, (4, )), 2, 'shard')
        # Topologically Sorted Source Nodes: [], Original ATen: []
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        torch.ops._c10d_functional.wait_tensor.default(buf2)
        extern_kernels.mm(x, reinterpret_tensor(buf1, (2, 2), (2, 1), 0), out=buf5)
        torch.ops._c10d_functional.wait_tensor.default(buf3)
        extern_kernels.mm(buf5, buf3, out=buf6)
        cpp_fused_add_0(buf6, buf2)
        torch.ops._c10d_functional.all_reduce_.default(reinterpret_tensor(buf6, (4, )), 'avg', 'replicate')
        torch.ops._c10d_functional.wait_tensor.default(reinterpret_tensor(buf6, (4, )))
        return (buf6, )
"""


def _line(text: str) -> str:
    return next(line for line in WRITTEN[WRITTEN.index("def call") :].splitlines(keepends=True) if text in line)


def _moved(text: str, before: str) -> str:
    """The code with one line moved right before another one."""
    body = WRITTEN.index("def call")
    head, tail = WRITTEN[:body], WRITTEN[body:].replace(_line(text), "", 1)
    return head + tail.replace(_line(before), _line(text) + _line(before), 1)


def test_code_in_the_order_of_the_graph_passes_and_matmuls_are_compared() -> None:
    compared = compare(planned_calls(_planned()), WRITTEN, "forward")
    assert "mm" in compared
    assert "add" not in compared  # Inductor's own kernels have no place of their own


@pytest.mark.parametrize(
    ("text", "before"),
    [
        pytest.param("wait_tensor.default(buf3)", "extern_kernels.mm(x", id="a wait before the matmul ahead of it"),
        pytest.param("wait_tensor.default(buf2)", "wait_tensor.default(buf1)", id="two messages of a gather"),
        pytest.param("all_gather_into_tensor.default(", "extern_kernels.mm(buf5", id="a gather that starts late"),
        pytest.param("all_reduce_.default(", "wait_tensor.default(buf3)", id="a reduction that starts early"),
    ],
)
def test_a_call_out_of_place_is_refused(text: str, before: str) -> None:
    with pytest.raises(InvariantError, match="the forward graph communicates in another order") as caught:
        compare(planned_calls(_planned()), _moved(text, before), "forward")
    shown = str(caught.value)
    assert re.search(r"planned:\n(    .*\n)*  > %", shown)
    assert re.search(r"written:\n(    .*\n)*  > .*(torch\.ops|extern_kernels)", shown)
    assert "'lower': 'eager'" in shown


def test_a_call_that_is_missing_is_refused() -> None:
    with pytest.raises(InvariantError, match="in another order"):
        compare(
            planned_calls(_planned()),
            WRITTEN.replace(_line("wait_tensor.default(reinterpret_tensor(buf6"), ""),
            "forward",
        )


def test_a_matmul_may_take_its_bias_in_or_leave_it_out() -> None:
    code = WRITTEN.replace("extern_kernels.mm(x, ", "extern_kernels.addmm(bias, x, ")
    assert "mm" in compare(planned_calls(_planned()), code, "forward")


def test_matmuls_that_became_kernels_are_left_out() -> None:
    code = WRITTEN.replace(_line("extern_kernels.mm(x"), "")
    assert "mm" not in compare(planned_calls(_planned()), code, "forward")


def test_code_that_is_no_python_is_not_compared() -> None:
    assert compare(planned_calls(_planned()), "void inductor_entry_impl() {}", "forward") == []


def _cut(*sizes: int, host: str = "torch.ops.own.op.default(buf6)") -> str:
    """The code in functions of so many lines that CUDA graphs are recorded of, with a call between each two."""
    lines = WRITTEN[WRITTEN.index("        buf0 =") : WRITTEN.index("        return")].splitlines()
    functions, calls = "", []
    for number, size in enumerate(sizes):
        body, lines = lines[:size], lines[size:]
        functions += "\n".join([f"def partition_{number}(args):", *body, "    return ()", "", ""])
        calls += [f"        () = self.partitions[{number}](partition{number}_args)", f"        {host}"]
    return "\n".join([functions, "class Runner:", "    def call(self, args):", *calls[:-1], *lines, ""])


ALL, BEFORE_THE_SUM, BEFORE_A_WAIT = 14, 12, 10


def test_code_that_cuda_graphs_are_recorded_of_is_compared() -> None:
    for code in (_cut(ALL), _cut(BEFORE_THE_SUM, 2)):
        assert "mm" in compare(planned_calls(_planned()), code, "forward")
    with pytest.raises(ConfigError, match=r"the forward graph calls .*CUDA graph") as caught:
        compare(planned_calls(_planned()), _cut(ALL).replace("buf1)", "buf9)"), "forward")
    assert "planned:" in str(caught.value)


def test_no_cuda_graph_ends_while_a_collective_is_under_way() -> None:
    with pytest.raises(ConfigError, match=r"calls own\.op, which no CUDA graph can record") as caught:
        compare(planned_calls(_planned()), _cut(BEFORE_A_WAIT - 4, ALL), "backward")
    assert "step_in_backward()" in str(caught.value)
