"""The only ways in which passes change a graph: record operators with their type, move nodes, erase what is unused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from fsdp_compile._torch.dynamo import detect_fake_mode
from fsdp_compile.ir.graph import KEY, Record, Role, role_of
from fsdp_compile.ir.queries import TEXT_POSITION, kept_order

_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "partitioner_tag")


class GraphBuilder:
    """Records operators at one place of a graph, each with its record, its fake value and the source line it serves.

    `source` is the node of the user's program for which operators are recorded: they take over its stack trace.
    """

    def __init__(self, graph: fx.Graph, record: Record, source: fx.Node) -> None:
        self.graph = graph
        self.record = record
        self.source = source

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Records `op` and infers the type of its result."""
        node = self.graph.call_function(op, args, kwargs)
        node.meta.update({key: self.source.meta[key] for key in _PROVENANCE if key in self.source.meta})
        node.meta[KEY] = self.record
        node.meta["val"] = infer_value(node)
        return node

    def value(self, x: fx.Node) -> torch.Tensor:
        """The fake tensor behind a node."""
        return x.meta["val"]

    @contextmanager
    def as_role(self, role: Role) -> Iterator[None]:
        """Records operators under another role inside the block."""
        before, self.record = self.record, dataclasses.replace(self.record, role=role)
        try:
            yield
        finally:
            self.record = before


def infer_value(node: fx.Node) -> Any:
    """The fake result of a node, from the fake values of its inputs."""
    args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    mode = detect_fake_mode([source.meta.get("val") for source in node.all_input_nodes])
    if mode is None:
        # A factory such as `aten.zeros` belongs to the fake mode of the graph, else its result is a real tensor.
        mode = detect_fake_mode([n.meta.get("val") for n in node.graph.find_nodes(op="placeholder")])
    with mode or nullcontext():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def set_read_text(marker: fx.Node, text: str) -> None:
    """Replaces the text of the spec that a marker carries."""
    marker.update_arg(TEXT_POSITION[marker.target], text)


def move(graph: fx.Graph, moves: Iterable[tuple[Iterable[fx.Node], fx.Node]]) -> None:
    """Moves nodes to right before an anchor, in the order given, one group after the other.

    The order that comes out is one that can run: whatever would stand in front of a node that it needs, a moved one or
    one that reads a moved one, stands right behind that. Order that data flow does not tell (`kept_order`) stays.

    Each of `moves`, nodes and their anchor, is asked for when those before it have been moved.
    """
    needs: dict[fx.Node, list[fx.Node]] = {node: list(node.all_input_nodes) for node in graph.nodes}
    for first, later in kept_order(graph):
        needs[later].append(first)
    for group, anchor in moves:
        nodes, place = dict.fromkeys(group), anchor
        while place in nodes:
            place = place.next
        for node in nodes:
            place.prepend(node)
    _put_behind_needs(graph, needs)


def _put_behind_needs(graph: fx.Graph, needs: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Moves nodes that stand in front of what they need; others stay. There is an order: nodes were in one before."""
    done: set[fx.Node] = set()
    waiting: dict[fx.Node, list[fx.Node]] = {}
    for node in list(graph.nodes):
        last, todo = node, [node]
        while todo:
            one = todo.pop(0)
            missing = next((need for need in needs[one] if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(one)
                continue
            if one is not node:
                last.append(one)
            last = one
            done.add(one)
            todo = waiting.pop(one, []) + todo


def with_needs(start: fx.Node, anchor: fx.Node) -> list[fx.Node]:
    """`start` behind all that it needs, to be moved to `anchor`; a copy from the host that is under way there stays."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            started = role_of(source) is Role.OFFLOAD_IN and source < anchor
            if source.op == "call_function" and source not in found and not started:
                visit(source)
        found[node] = None

    visit(start)
    return list(found)


def sink(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Moves each node, given in graph order, to right before its first user."""
    # Nodes compare by where they are now.
    move(graph, (([node], min(node.users)) for node in reversed(nodes) if node.users))


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erases those of `nodes` (given in graph order) that have no users left, last first."""
    for node in reversed(list(nodes)):
        if not node.users:
            node.graph.erase_node(node)
