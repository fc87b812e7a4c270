"""Functions among the arguments of a call in a graph: the bodies of control flow."""

from __future__ import annotations

from typing import Any

from torch import fx


def functions_of(call: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments that are functions."""
    return [n for n in call.all_input_nodes if n.op == "get_attr" and isinstance(attribute(n), fx.GraphModule)]


def attribute(node: fx.Node) -> Any:
    """The value of a `get_attr` node."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def function_at(node: fx.Node) -> fx.GraphModule:
    """The function that a `get_attr` node gives."""
    value = attribute(node)
    assert isinstance(value, fx.GraphModule)
    return value


def add_attribute(graph: fx.Graph, name: str, value: Any) -> str:
    """Sets an attribute of a graph's module under a name that is free; returns that name."""
    gm: Any = graph.owning_module
    stem, number = name.replace(".", "_"), 0
    while hasattr(gm, f"{stem}_{number}"):
        number += 1
    setattr(gm, f"{stem}_{number}", value)
    return f"{stem}_{number}"
