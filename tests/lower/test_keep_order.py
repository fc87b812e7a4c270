"""The order of communication in Inductor's code: kept where kernels are fused, read, and compared with the graph's."""

from __future__ import annotations

import dataclasses
import re
from operator import getitem
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._inductor.utils import run_and_get_code

import fsdp_compile.lower.inductor
from fsdp_compile import fully_shard
from fsdp_compile.errors import ConfigError, InvariantError
from fsdp_compile.lower.inductor import KEEP_OUR_ORDER, PlaceLate
from fsdp_compile.lower.written_order import Call, compare, planned_calls, written_calls
from tests.fake_world import fake_world
from tests.models.layers import InARow, Residual

collectives = torch.ops._c10d_functional


def _two_kernels_that_read_the_same(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = x.sin()
    gathering = collectives.all_gather_into_tensor(w, 2, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    meanwhile = torch.mm(x, x)
    gathered = collectives.wait_tensor(gathering)
    last = torch.mm(gathered, x)
    return first, meanwhile, last * x.cos()


def _order(settings: dict[str, Any]) -> list[str]:
    torch.compiler.reset()
    x = torch.ones(16, 16)
    with fake_world(2), torch.no_grad():
        compiled = torch.compile(_two_kernels_that_read_the_same, options=settings)
        _, (code,) = run_and_get_code(compiled, x, torch.ones(8, 16))
    return [call.operator for call in written_calls(code)]


@pytest.mark.inductor
def test_a_fused_kernel_pulls_no_wait_ahead() -> None:
    planned = ["all_gather_into_tensor", "mm", "wait_tensor", "mm"]
    assert _order(dict(KEEP_OUR_ORDER)) == planned
    # What it is for: by itself, Inductor puts both kernels where the first one was, and what the second needs before.
    assert _order({name: value for name, value in KEEP_OUR_ORDER.items() if "custom_pass" not in name}) != planned


def _two_sums_that_read_the_same(x: torch.Tensor) -> torch.Tensor:
    first = torch.mm(x, x)
    of_first = (first * x).sum(0)
    second = torch.mm(first, x)
    return torch.cat([of_first, (second * x).sum(0)])


@pytest.mark.inductor
def test_a_sum_does_not_wait_for_another_one_while_what_it_reads_could_be_freed() -> None:
    torch.compiler.reset()
    settings: dict[str, Any] = dict(KEEP_OUR_ORDER)
    compiled = torch.compile(_two_sums_that_read_the_same, options=settings)
    _, (code,) = run_and_get_code(compiled, torch.ones(64, 64))
    kernels = re.findall(r"^ +(extern_kernels\.mm|cpp_fused)", code[code.index("def call(") :], re.M)
    assert kernels == ["extern_kernels.mm", "cpp_fused", "extern_kernels.mm", "cpp_fused"]


@pytest.mark.long
@pytest.mark.inductor
def test_matmuls_are_among_what_every_compile_compares() -> None:
    found: list[tuple[str, list[str]]] = []

    def note(planned: list[Call], code: str, phase: str) -> list[str]:
        found.append((phase, real(planned, code, phase)))
        return found[-1][1]

    real = fsdp_compile.lower.inductor.compare
    with fake_world(2), mock.patch.object(fsdp_compile.lower.inductor, "compare", note):
        torch.manual_seed(0)
        model = InARow([Residual(32, 64), Residual(32, 64), nn.Linear(32, 32, bias=False)])
        fully_shard(model)
        torch.compile(model, backend="fsdp")(torch.ones(4, 32)).sum().backward()
    assert [phase for phase, _ in found] == ["forward", "backward"]
    for _, compared in found:
        assert {"all_gather_into_tensor_coalesced", "wait_tensor", "mm"} <= set(compared)


@dataclasses.dataclass(eq=False)
class _Node:
    """As much of a node of Inductor's scheduler as is asked for, and of what it depends on."""

    name: str
    max_order: int
    unmet_dependencies: tuple[_Node, ...] = ()

    def get_buffer_names(self) -> set[str]:
        return {self.name}


def _placed(*nodes: _Node) -> list[str]:
    return [node.name for node in PlaceLate()(list(nodes))]


def test_a_fused_kernel_moves_to_its_last_part_but_not_behind_what_reads_it_through_others() -> None:
    fused, a, b = _Node("fused", 3), _Node("a", 1), _Node("b", 2)
    assert _placed(fused, a, b) == ["a", "b", "fused"]
    assert _placed(fused, a, _Node("reader", 2, (fused,))) == ["a", "fused", "reader"]
    x = _Node("x", 9)
    y = _Node("y", 8, (x,))
    z = _Node("z", 7, (y,))
    assert _placed(x, y, z, a, _Node("end", 2, (z,))) == ["a", "x", "y", "z", "end"]


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
    "code",
    [
        pytest.param(_moved("wait_tensor.default(buf3)", "extern_kernels.mm(x"), id="a wait before an earlier matmul"),
        pytest.param(_moved("wait_tensor.default(buf2)", "wait_tensor.default(buf1)"), id="two messages of a gather"),
        pytest.param(_moved("all_gather_into_tensor.default(", "extern_kernels.mm(buf5"), id="a gather starts late"),
        pytest.param(_moved("all_reduce_.default(", "wait_tensor.default(buf3)"), id="a reduction starts early"),
        pytest.param(WRITTEN.replace(_line("wait_tensor.default(buf3)"), ""), id="a wait is missing"),
    ],
)
def test_a_call_out_of_place_is_refused(code: str) -> None:
    with pytest.raises(InvariantError, match="the forward graph communicates in another order") as caught:
        compare(planned_calls(_planned()), code, "forward")
    shown = str(caught.value)
    assert re.search(r"planned:\n(    .*\n)*  > %", shown)
    assert re.search(r"written:\n(    .*\n)*  > .*(torch\.ops|extern_kernels)", shown)
    assert "'lower': 'eager'" in shown


def test_what_is_compared_of_other_code() -> None:
    with_bias = WRITTEN.replace("extern_kernels.mm(x, ", "extern_kernels.addmm(bias, x, ")
    assert "mm" in compare(planned_calls(_planned()), with_bias, "forward")
    became_a_kernel = WRITTEN.replace(_line("extern_kernels.mm(x"), "")
    assert "mm" not in compare(planned_calls(_planned()), became_a_kernel, "forward")
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
