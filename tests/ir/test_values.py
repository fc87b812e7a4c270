"""What is inferred by arithmetic is what torch infers."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.tensors import FakeTensorMode
from fsdp_compile.ir.edit import infer_value
from fsdp_compile.ir.fake_values import known_value

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Fake tensors of any layout: new ones, parts of larger ones, transposed, expanded and empty ones."""
    shape: list[int] = draw(st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=4))
    narrowed, permuted, expanded = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    with FakeTensorMode():
        x = torch.empty(shape, dtype=draw(DTYPES))
        if shape and narrowed:
            dim = draw(st.integers(0, len(shape) - 1))
            start = draw(st.integers(0, x.shape[dim]))
            x = x.narrow(dim, start, draw(st.integers(0, x.shape[dim] - start)))
        if permuted:
            x = x.permute(draw(st.permutations(range(x.dim()))))
        return x.unsqueeze(0).expand(2, *x.shape) if expanded else x


@st.composite
def calls(draw: st.DrawFn) -> fx.Node:
    """Calls of the operators that are known, with any arguments that the tensor allows."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    value = x.meta["val"] = draw(tensors())
    shapes = [[value.numel()], [1, value.numel()], list(value.shape), [*value.shape, 1], [-1] if value.numel() else [0]]
    formats = st.sampled_from([None, torch.preserve_format, torch.contiguous_format])
    possible: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.view.default, (x, draw(st.sampled_from(shapes))), {}),
        (aten.permute.default, (x, draw(st.permutations(range(value.dim())))), {}),
        (aten.clone.default, (x,), {"memory_format": draw(formats)}),
        (aten.clone.default, (x,), {}),
        (CAST, (x, draw(DTYPES)), {}),
        (collectives.wait_tensor.default, (x,), {}),
    ]
    if value.dim():
        bound, dim = st.integers(-3, 9), draw(st.integers(-value.dim(), value.dim() - 1))
        possible += [
            (aten.slice.Tensor, (x, dim, draw(bound), draw(bound)), {}),
            (aten.slice.Tensor, (x, dim, draw(bound), draw(bound), draw(st.integers(1, 3))), {}),
            (aten.slice.Tensor, (x, dim, None, draw(bound)), {}),
            (collectives.all_gather_into_tensor.default, (x, draw(st.integers(1, 4)), "fsdp.shard.0"), {}),
            (collectives.reduce_scatter_tensor.default, (x, "avg", draw(st.integers(1, 4)), "fsdp.shard.0"), {}),
        ]
    if value.dim() == 4 and value.numel():
        possible.append((aten.clone.default, (x,), {"memory_format": torch.channels_last}))
    target, args, kwargs = draw(st.sampled_from(possible))
    return graph.call_function(target, args, kwargs)


def kind(value: torch.Tensor) -> tuple[Any, ...]:
    """What graphs know of a value."""
    numbers = tuple(value.shape), value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
    return type(value), *numbers, value.dtype, value.device, value.layout, value.requires_grad


def by_torch(node: fx.Node) -> torch.Tensor:
    x = node.all_input_nodes[0].meta["val"]
    with x.fake_mode:
        return node.target(x, *node.args[1:], **node.kwargs)  # type: ignore[operator]


@given(calls())
def test_what_is_known_is_what_torch_infers(node: fx.Node) -> None:
    try:
        inferred = by_torch(node)
    except (RuntimeError, ValueError):  # strides that allow no such view
        assert known_value(node) is None
        return
    known, memory = infer_value(node), node.all_input_nodes[0].meta["val"].untyped_storage()._cdata
    assert kind(known) == kind(inferred)
    shared = [each.untyped_storage()._cdata == memory for each in (known, inferred)]
    assert shared[0] == shared[1], "what shares memory does so in both"
    assert known.fake_mode is inferred.fake_mode  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.view.default, ([8, 4],), {}),
        (aten.slice.Tensor, (0, 3, 9), {}),
        (aten.permute.default, ([0],), {}),
        (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
        (CAST, (torch.bfloat16,), {}),
        (collectives.wait_tensor.default, (), {}),
        (collectives.all_gather_into_tensor.default, (4, "fsdp.shard.0"), {}),
        (collectives.reduce_scatter_tensor.default, ("avg", 4, "fsdp.shard.0"), {}),
    ],
)
def test_what_each_parameter_takes_is_known(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(32)
    node = graph.call_function(target, (x, *args), kwargs)
    assert known_value(node) is not None
    assert kind(known_value(node)) == kind(by_torch(node))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_begins_behind_all_that_lies_before_it(dim: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(8, 4)[1:]
    node = graph.call_function(aten.slice.Tensor, (x, dim, 2, 3))
    assert kind(known_value(node)) == kind(by_torch(node))


def test_items_of_a_list_are_the_very_values() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = [torch.empty(2), torch.empty(3)]
    assert known_value(graph.call_function(operator.getitem, (x, 1))) is x.meta["val"][1]


def test_what_is_real_dynamic_or_differentiated_is_left_to_torch() -> None:
    mode = FakeTensorMode()
    with mode:
        differentiated, complex_ = torch.empty(4, requires_grad=True), torch.empty(4, dtype=torch.complex64)
    for value in (torch.empty(4), differentiated, complex_, None):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = value
        assert known_value(graph.call_function(aten.clone.default, (x,))) is None
