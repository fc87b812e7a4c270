"""Any graph of tensors, numbers and records is read back."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fsdp_compile._torch.tensors import FakeTensorMode
from fsdp_compile.ir.edit import infer_value
from fsdp_compile.ir.graph import KEY, Phase, Record, Role, StepGraph
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph
from fsdp_compile.layout.spec import Reshard, UnshardSpec
from tests.verify.test_correct_graphs import records_of

aten = torch.ops.aten
NAMES = st.text(st.sampled_from("abw.01_-' "), min_size=1, max_size=8).filter(lambda name: not name.startswith("."))
NUMBERS = st.one_of(st.integers(-9, 9), st.floats(width=32))
USUAL_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex128, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]
DTYPES_SENT = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def flat_records(draw: st.DrawFn, unit: str) -> Record:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    offset, specs = 0, []
    for _ in names:
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        extent = draw(st.integers(1, 4)) * 32
        specs.append(
            UnshardSpec(
                offset=offset,
                extent=extent,
                shape=shape,
                dim=draw(st.integers(0, len(shape) - 1)) if shape else None,
                size=draw(st.integers(1, 4)),
                group="fsdp.shard.0",
                param_dtype=draw(DTYPES_SENT),
                reduce_dtype=draw(DTYPES_SENT),
                reshard=draw(st.sampled_from(Reshard)),
            )
        )
        offset += extent
    below = draw(st.booleans())
    full_names = tuple(f"{unit}.{name}" if below else f"p{name}" for name in names)
    return Record(Role.FLAT, unit, full_names, tuple(specs), Phase.FORWARD)


@st.composite
def graphs(draw: st.DrawFn) -> StepGraph:
    phase = draw(st.sampled_from(Phase))
    graph, mode = fx.Graph(), FakeTensorMode()
    flats = [draw(flat_records(unit)) for unit in draw(st.lists(NAMES, max_size=2, unique=True))]
    for index, record in enumerate(flats):
        flat = graph.placeholder(f"flat_{index}")
        flat.meta[KEY] = record
        with mode:
            flat.meta["val"] = torch.empty(record.specs[-1].offset + record.specs[-1].extent)
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=3))
    for index, shape in enumerate(shapes):
        with mode:
            value = torch.empty(shape, dtype=draw(st.sampled_from(USUAL_DTYPES)))
        graph.placeholder(f"x_{index}").meta["val"] = value
    for _ in range(draw(st.integers(0, 6))):
        node = draw_call(draw, graph)
        node.meta["val"] = infer_value(node)
        if bool(flats) and draw(st.booleans()):
            record = draw(st.sampled_from(flats))
            count = draw(st.integers(1, len(record.parameters)))
            role = draw(st.sampled_from([role for role in Role if role is not Role.FLAT]))
            node.meta[KEY] = Record(role, record.unit, record.parameters[:count], record.specs[:count], phase)
    tensors = [node for node in graph.nodes if isinstance(node.meta["val"], torch.Tensor)]
    graph.output(tuple(draw(st.lists(st.one_of(st.none(), st.sampled_from(tensors)), max_size=3))))
    return StepGraph(fx.GraphModule(torch.nn.Module(), graph), phase)


def draw_call(draw: st.DrawFn, graph: fx.Graph) -> fx.Node:
    """Any call that any tensor allows."""
    lists = [node for node in graph.nodes if isinstance(node.meta["val"], list)]
    if bool(lists) and draw(st.booleans()):
        return graph.call_function(operator.getitem, (draw(st.sampled_from(lists)), 0))
    x = draw(st.sampled_from([node for node in graph.nodes if isinstance(node.meta["val"], torch.Tensor)]))
    dim = draw(st.integers(-1, 0)) if x.meta["val"].dim() else 0
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.view.default, (x, [-1] if x.meta["val"].numel() else [0]), {}),
        (aten.permute.default, (x, list(reversed(range(x.meta["val"].dim())))), {}),
        (aten._to_copy.default, (x,), {"dtype": draw(st.sampled_from(USUAL_DTYPES))}),
        (aten.full.default, ([2, 3], draw(NUMBERS)), {"dtype": torch.float64, "device": torch.device("cpu")}),
        (aten.stack.default, ([x, x], 0), {}),
        (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
    ]
    if x.meta["val"].dim():
        calls.append((aten.split.Tensor, (x, 2, dim), {}))
        calls.append((aten.slice.Tensor, (x, dim, 1, 3, 2), {}))
    target, args, kwargs = draw(st.sampled_from(calls))
    if target is aten.view.default and not x.meta["val"].is_contiguous():
        target, args = aten.reshape.default, (x, [-1])
    return graph.call_function(target, args, kwargs)


def shown(node: fx.Node) -> tuple[Any, ...]:
    """What must be equal of two nodes; NaN is equal to itself here."""

    def constant(value: Any) -> Any:
        return "nan" if isinstance(value, float) and math.isnan(value) else value

    args = fx.node.map_arg((node.args, node.kwargs), str)
    return node.op, node.name, node.target, torch.utils._pytree.tree_map(constant, args)


@settings(max_examples=60)
@given(graphs())
def test_any_graph_is_read_back(step: StepGraph) -> None:
    text = format_graph(step)
    parsed = parse_graph(text)
    assert format_graph(parsed) == text
    assert records_of(parsed) == records_of(step)
    assert [shown(node) for node in parsed.graph.nodes] == [shown(node) for node in step.graph.nodes]
    assert parsed.phase is step.phase
