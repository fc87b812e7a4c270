"""What calls in a graph write into, as far as they tell."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fsdp_compile.capture.written import written_nodes
from torch import fx


def _call(function: Callable[..., Any], *rest: Any, **kwargs: Any) -> list[str]:
    """The names of the placeholders x and y that a call with x (and with those of `rest`) writes into."""
    graph = fx.Graph()
    places = {name: graph.placeholder(name) for name in ("x", "y")}
    node = graph.call_function(function, (places["x"], *(places.get(value, value) for value in rest)), kwargs)
    return [written.name for written in written_nodes(node)]


@pytest.mark.parametrize(
    ("function", "rest"),
    [
        (F.leaky_relu, (0.1, True)),
        (F.elu, (1.0, True)),
        (F.hardtanh, (-1.0, 1.0, True)),
        (F.hardswish, (True,)),
        (F.threshold, (0.1, 20.0, True)),
        (F.dropout, (0.5, True, True)),
        (F.relu_, ()),
        (operator.iadd, (1,)),
        (torch.Tensor.add_, (1,)),
    ],
)
def test_calls_that_write(function: Callable[..., Any], rest: tuple[Any, ...]) -> None:
    assert _call(function, *rest) == ["x"]


def test_calls_that_do_not_write() -> None:
    assert _call(F.leaky_relu, *(0.1, False)) == _call(F.dropout, *(0.5, True)) == _call(torch.add, 1) == []


def test_by_name() -> None:
    assert _call(F.silu, inplace=True) == ["x"]
    assert _call(F.silu, inplace=False) == []


def test_statistics() -> None:
    before = (None, None, "y", None)
    assert _call(torch.native_batch_norm, *(*before, True, 0.1, 1e-5)) == ["y"]
    assert _call(torch.native_batch_norm, *(*before, False, 0.1, 1e-5)) == []


@pytest.mark.parametrize(
    ("method", "writes"), [("add_", True), ("__iadd__", True), ("__setitem__", True), ("add", False)]
)
def test_methods(method: str, writes: bool) -> None:  # noqa: FBT001
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert list(written_nodes(graph.call_method(method, (x, 1)))) == ([x] if writes else [])
