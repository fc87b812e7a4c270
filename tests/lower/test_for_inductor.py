"""What is changed in graphs before Inductor sees them: matmuls, casts, formats of few bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compile.cost.fusion import WRITTEN
from fsdp_compile.ir.graph import KEY, Phase, Record, Role
from fsdp_compile.layout.wire_formats import FORMATS
from fsdp_compile.lower.before_inductor import keep_matmuls, open_dequantize, write_before_waits
from fsdp_compile.ops.quantize import DEQUANTIZE, block_scales, quantize

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default


@pytest.mark.parametrize(
    ("between", "join", "stays"),
    [
        pytest.param([], aten.add.Tensor, False, id="nothing between"),
        pytest.param(["wait"], aten.add.Tensor, True, id="a wait"),
        pytest.param(["other matmul"], aten.add.Tensor, True, id="a matmul"),
        pytest.param(["relu"], aten.add.Tensor, False, id="a kernel of Inductor's"),
        pytest.param(["added matmul"], aten.add.Tensor, False, id="the other summand"),
        pytest.param(["wait", "added matmul"], aten.add.Tensor, True, id="a wait, and the other summand"),
        pytest.param(["wait"], aten.mul.Tensor, False, id="a wait, and no sum"),
        pytest.param(["wait"], aten.sub.Tensor, False, id="a wait, and a difference"),
    ],
)
def test_matmuls_that_stay(between: list[str], join: torch._ops.OpOverload, *, stays: bool) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, 4)

    def call(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = x.meta["val"]
        return node

    matmul = call(aten.mm.default, x, x)
    added = x
    for each in between:
        if each == "wait":
            call(WAIT, x)
        elif each == "relu":
            call(aten.relu.default, x)
        elif each == "other matmul":
            call(aten.mm.default, x, x)
        else:
            added = call(aten.mm.default, x, x)
    total = call(join, added, matmul)
    graph.output(total)
    keep_matmuls(graph)
    assert (matmul not in total.all_input_nodes) is stays
    assert next(node for node in graph.nodes if node.target is aten.mm.default) is matmul


collectives = torch.ops._c10d_functional
cast = torch.ops.prims.convert_element_type.default


@pytest.mark.parametrize(
    ("stored", "sent", "waits", "written"),
    [
        pytest.param(torch.float32, torch.bfloat16, 1, True, id="a wait between"),
        pytest.param(torch.float32, torch.bfloat16, 0, False, id="no wait between"),
        pytest.param(torch.bfloat16, torch.float32, 1, False, id="a wait between, and the cast takes more memory"),
    ],
)
def test_casts_that_are_marked(stored: torch.dtype, sent: torch.dtype, waits: int, *, written: bool) -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        values = {dtype: torch.empty(4, 4, dtype=dtype) for dtype in (stored, sent)}
    gradient, other = graph.placeholder("gradient"), graph.placeholder("other")
    gradient.meta["val"] = values[stored]
    made = graph.call_function(cast, (gradient, sent))
    made.meta["val"] = values[sent]
    message = graph.call_function(torch.ops.aten.view.default, (made, [16]))
    for _ in range(waits):
        graph.call_function(collectives.wait_tensor.default, (other,))
    start = graph.call_function(collectives.reduce_scatter_tensor.default, (message, "avg", 2, "shard"))
    start.meta[KEY] = Record(Role.REDUCE, "", (), (), Phase.BACKWARD)
    graph.output(start)
    write_before_waits(graph)
    assert made.meta.get(WRITTEN, False) is written


RANKS, BLOCKS, BLOCK = 3, 6, 128


def _received(sent: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The messages of all ranks, with a block of zeros and one that is not finite."""
    shards = torch.randn(RANKS, BLOCKS * BLOCK, generator=torch.Generator().manual_seed(1))
    shards[0, :BLOCK] = 0
    shards[1, BLOCK] = torch.inf
    scales = [block_scales(shard, sent) for shard in shards]
    elements = [quantize(shard, scale, sent) for shard, scale in zip(shards, scales, strict=True)]
    return torch.cat(elements), torch.cat(scales)


def _graph(messages: tuple[torch.Tensor, torch.Tensor], sent: str, dtype: torch.dtype) -> fx.GraphModule:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("gathered", "scales")]
    full = graph.call_function(DEQUANTIZE, (*inputs, sent, RANKS, dtype))
    full.meta[KEY] = Record(Role.COPY_OUT, "", (), (), Phase.FORWARD)
    graph.output(full)
    with FakeTensorMode() as mode:
        for node, value in zip(inputs, messages, strict=True):
            node.meta["val"] = mode.from_tensor(value)
        full.meta["val"] = torch.empty(RANKS * BLOCKS * BLOCK, dtype=dtype)
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sent", FORMATS)
def test_the_bits_are_those_of_the_operator(sent: str, dtype: torch.dtype) -> None:
    messages = _received(sent)
    gm = _graph(messages, sent, dtype)
    expected = gm(*messages)
    open_dequantize(gm.graph)
    gm.recompile()
    assert not gm.graph.find_nodes(op="call_function", target=DEQUANTIZE)
    found = gm(*messages)
    assert found.dtype is dtype
    assert found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.inductor
@pytest.mark.parametrize("sent", ["float8_e4m3fn", "mxfp8", "nvfp4"])
def test_inductor_makes_one_kernel_of_it(sent: str) -> None:
    messages = _received(sent)
    gm = _graph(messages, sent, torch.bfloat16)
    expected = gm(*messages)
    open_dequantize(gm.graph)
    gm.recompile()
    found, (code,) = run_and_get_code(torch.compile(copy.deepcopy(gm)), *messages)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert code.count("async_compile.cpp_pybinding(") == 1
