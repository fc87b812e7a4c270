"""What a collective sends is computed before a wait that stands between."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compile.cost.fusion import WRITTEN
from fsdp_compile.ir.graph import KEY, Phase, Record, Role
from fsdp_compile.lower.before_inductor import write_before_waits

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
