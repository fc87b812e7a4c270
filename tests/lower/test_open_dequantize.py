"""What takes the place of `fsdp_compile::dequantize` under Inductor gives the same bits, and is one kernel there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compile.ir.graph import KEY, Phase, Record, Role
from fsdp_compile.layout.wire_formats import FORMATS
from fsdp_compile.lower.before_inductor import open_dequantize
from fsdp_compile.ops.quantize import DEQUANTIZE, block_scales, quantize

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
