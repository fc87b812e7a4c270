"""Functions among the arguments of a call in a graph: the bodies of control flow, and nested regions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fsdp_compile._torch.tensors import HigherOrderOperator

_INVOKE = "invoke_subgraph"
"""Name of the operator that calls a nested region (`torch.compiler.nested_compile_region`)."""


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


def calls_region(node: fx.Node) -> bool:
    """Whether a node calls a nested region."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == _INVOKE


def region_calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls of nested regions in a graph, in its order."""
    return filter(calls_region, graph.nodes)


def region_of(call: fx.Node) -> fx.GraphModule:
    """The nested region that a call runs."""
    function = call.args[0]
    assert isinstance(function, fx.Node)
    return function_at(function)


def operands_of(call: fx.Node) -> tuple[Any, ...]:
    """What a nested region is called with, in the order of its placeholders."""
    return call.args[2:]  # after the region and its name


def inline(call: fx.Node) -> list[fx.Node]:
    """Replaces the call of a nested region by copies of its nodes; returns these."""
    region = region_of(call)
    copies: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands_of(call), strict=True))
    operands = len(copies)
    with call.graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op == "get_attr":
                copies[node] = call.graph.get_attr(add_attribute(call.graph, str(node.target), attribute(node)))
                copies[node].meta = dict(node.meta)
            elif node.op not in ("placeholder", "output"):
                copies[node] = call.graph.node_copy(node, copies.__getitem__)
    (returned,) = region.graph.output_node().args
    results: Any = fx.node.map_arg(returned, copies.__getitem__)
    for item in list(call.users):
        item.replace_all_uses_with(results[item.args[1]])
        call.graph.erase_node(item)
    erase_call(call)
    return list(copies.values())[operands:]


def erase_call(call: fx.Node) -> None:
    """Erases a call without users, and its functions if nothing else calls them."""
    functions = functions_of(call)
    call.graph.erase_node(call)
    for function in functions:
        if not function.users:
            call.graph.erase_node(function)
