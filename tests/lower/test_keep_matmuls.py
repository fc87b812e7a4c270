"""Matmuls stay where the plan has them: Inductor's joining with an addition below would take them past a wait."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_compile.lower.before_inductor import keep_matmuls

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default


@pytest.mark.parametrize(
    ("between", "stays"),
    [
        pytest.param([], False, id="nothing between"),
        pytest.param(["wait"], True, id="a wait"),
        pytest.param(["other matmul"], True, id="a matmul"),
        pytest.param(["relu"], False, id="a kernel of Inductor's"),
        pytest.param(["added matmul"], False, id="the other summand"),
        pytest.param(["wait", "added matmul"], True, id="a wait, and the other summand"),
    ],
)
def test_matmuls_that_stay(between: list[str], *, stays: bool) -> None:
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
    total = call(aten.add.Tensor, added, matmul)
    graph.output(total)
    keep_matmuls(graph)
    assert (matmul not in total.all_input_nodes) is stays
    assert next(node for node in graph.nodes if node.target is aten.mm.default) is matmul


@pytest.mark.parametrize("operator", [aten.mul.Tensor, aten.sub.Tensor])
def test_what_is_not_an_addition_is_left(operator: torch._ops.OpOverload) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, 4)
    matmul = graph.call_function(aten.mm.default, (x, x))
    matmul.meta["val"] = x.meta["val"]
    graph.call_function(WAIT, (x,))
    graph.output(graph.call_function(operator, (x, matmul)))
    before = str(graph)
    keep_matmuls(graph)
    assert str(graph) == before
