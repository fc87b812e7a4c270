"""The only ways in which passes change a graph: record operators with their type, move nodes, erase what is unused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from fsdp_compile._torch.dynamo import detect_fake_mode
from fsdp_compile.ir.fake_values import known_value
from fsdp_compile.ir.graph import KEY, Record, Role
from fsdp_compile.ir.queries import TEXT_POSITION

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
    known = known_value(node)
    if known is not None:
        return known
    args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    mode = detect_fake_mode([source.meta.get("val") for source in node.all_input_nodes])
    if mode is None:
        # A factory such as `aten.zeros` belongs to the fake mode of the graph, else its result is a real tensor.
        mode = detect_fake_mode([n.meta.get("val") for n in node.graph.find_nodes(op="placeholder")])
    if mode is None:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]


def set_read_text(marker: fx.Node, text: str) -> None:
    """Replaces the text of the spec that a marker carries."""
    marker.update_arg(TEXT_POSITION[marker.target], text)


def move_before(nodes: Iterable[fx.Node], anchor: fx.Node) -> None:
    """Moves nodes, given in graph order, to right before `anchor`."""
    for node in nodes:
        anchor.prepend(node)


def sink(nodes: Iterable[fx.Node]) -> None:
    """Moves each node, given in graph order, to right before its first user."""
    for node in reversed(list(nodes)):
        if node.users:
            min(node.users).prepend(node)  # nodes compare by where they are now


def move_after(nodes: Sequence[fx.Node], anchor: fx.Node) -> None:
    """Moves nodes, given in graph order, to right after `anchor`, which is not one of them."""
    # Each goes right behind the anchor, so the last one goes first.
    for node in reversed(nodes):
        anchor.append(node)


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erases those of `nodes` (given in graph order) that have no users left, last first."""
    for node in reversed(list(nodes)):
        if not node.users:
            node.graph.erase_node(node)
