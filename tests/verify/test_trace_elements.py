"""The arithmetic on indices agrees with what the operators do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx

from fsdp_compile.verify.trace_elements import Step, coordinates, linear, moved

aten = torch.ops.aten
MOVES: list[tuple[str, Any, tuple[int, ...], tuple[Any, ...]]] = [
    ("view", aten.view.default, (4, 6), ([3, 8],)),
    ("clone", aten.clone.default, (4, 6), ()),
    ("cast", torch.ops.prims.convert_element_type.default, (4, 6), (torch.float64,)),
    ("slice", aten.slice.Tensor, (4, 6), (1, 2, 5)),
    ("slice-from-the-end", aten.slice.Tensor, (4, 6), (0, -3, 9223372036854775807)),
    ("slice-with-a-step", aten.slice.Tensor, (4, 6), (1, 1, 6, 2)),
    ("slice-of-all", aten.slice.Tensor, (4, 6), ()),
    ("permute", aten.permute.default, (2, 3, 4), ([2, 0, 1],)),
    ("expand", aten.expand.default, (1, 6), ([3, 6],)),
    ("expand-to-more-dimensions", aten.expand.default, (4, 1), ([2, 4, 3],)),
    ("pad", aten.constant_pad_nd.default, (4, 6), ([1, 2, 0, 3],)),
    ("cut-by-negative-padding", aten.constant_pad_nd.default, (4, 6), ([-1, 0],)),
]


def _node(operator: Any, shape: tuple[int, ...], arguments: tuple[Any, ...]) -> tuple[fx.Node, torch.Tensor]:
    """A node that applies an operator, and its value where every element of its input is its own index plus one."""
    graph = fx.Graph()
    source = graph.placeholder("source")
    source.meta["val"] = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    node = graph.call_function(operator, (source, *arguments))
    node.meta["val"] = operator(source.meta["val"], *arguments)
    return node, node.meta["val"].reshape(-1)


@pytest.mark.parametrize(("name", "operator", "shape", "arguments"), MOVES, ids=[m[0] for m in MOVES])
def test_each_element_is_found_where_the_operator_took_it(
    name: str, operator: Any, shape: tuple[int, ...], arguments: tuple[Any, ...]
) -> None:
    node, values = _node(operator, shape, arguments)
    for index, value in enumerate(values.tolist()):
        step = moved(node, index)
        assert step == (Step(None, 0) if value == 0 else Step(node.args[0], int(value) - 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_each_element_of_a_concatenation_is_found_in_its_part(dim: int) -> None:
    graph = fx.Graph()
    parts = [graph.placeholder(name) for name in "ab"]
    for part, first in zip(parts, (0.0, 100.0), strict=True):
        part.meta["val"] = torch.arange(first, first + 12).view(3, 4)
    node = graph.call_function(aten.cat.default, (parts, dim))
    node.meta["val"] = torch.cat([part.meta["val"] for part in parts], dim)
    for index, value in enumerate(node.meta["val"].reshape(-1).tolist()):
        assert moved(node, index) == Step(parts[int(value >= 100)], int(value) % 100)


def test_an_operator_that_computes_ends_the_trail() -> None:
    node, _ = _node(aten.neg.default, (4,), ())
    assert moved(node, 0) is None


def test_a_constant_other_than_zero_ends_the_trail() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.full.default, ([4], 1))
    node.meta["val"] = torch.ones(4)
    assert moved(node, 0) is None


def test_places_outside_of_a_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer elements"):
        coordinates(12, (3, 4))
    with pytest.raises(ValueError, match="smaller"):
        linear((0, 4), (3, 4))
