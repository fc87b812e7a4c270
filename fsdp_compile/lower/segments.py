"""Cuts a planned graph at its communication, so that what lies between is compiled apart, and what is alike once.

    %g = all_gather(%shard_1)      run as it is
    %a = mm(...); %b = relu(%a)    a segment
    %w = wait(%g)                  run as it is
    %c = mm(%b, %w); ...           a segment, like that of the layer before

The order of the plan cannot be undone. Nothing is fused across communication: what leaves a segment is in memory, with
the strides that the graph says.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.tensors import OpOverload, tree_leaves
from fsdp_compile.cost.fusion import WRITTEN, shares_memory


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring nodes that communicate nothing.

    Attributes:
        nodes: In their order.
        inputs: Nodes before them that they read.
        outputs: Those of them that are read behind them.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def cut(graph: fx.Graph) -> list[Segment | fx.Node]:
    """The nodes of a graph in their order, without inputs and output, those that compute in segments."""
    parts: list[Segment | fx.Node] = []
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for stays, run in itertools.groupby(calls, _is_run_as_it_is):
        nodes = list(run)
        are_views = all(node.op == "call_function" and shares_memory(node) for node in nodes)
        parts += nodes if stays or are_views else [_segment(nodes)]
    return parts


def _is_run_as_it_is(node: fx.Node) -> bool:
    """Whether a node is an operator of communication, or of this package, or takes a message out of its result.

    So are writes into inputs: a segment cannot know which of its inputs share memory with one that it writes into.
    """
    if node.target is getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_run_as_it_is(source)
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.namespace in ("_c10d_functional", "fsdp_compile") or node.target._schema.is_mutable


def _segment(nodes: Sequence[fx.Node]) -> Segment:
    mine = dict.fromkeys(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in mine)
    outputs = [node for node in nodes if any(user not in mine for user in node.users)]
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs))


def text_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """What a graph of `graph_of` computes from inputs of these types: the same where segments may share code."""
    written = [node.name for node in graph.graph.nodes if WRITTEN in node.meta]
    return "\n".join([*map(described, inputs), graph.code, *written])


def described(value: Any) -> str:
    """What code depends on of a value: all but the elements of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return str(value)


def has_open_sizes(graph: fx.Graph) -> bool:
    """Whether a graph has sizes that are known only when it runs."""
    values = tree_leaves([node.meta.get("val") for node in graph.nodes])
    return any(
        isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
        or (isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape))
        for value in values
    )


def graph_of(segment: Segment, owner: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own, from the segment's inputs to a tuple of its outputs; `owner` has its attributes.

    Its nodes are numbered: segments that compute the same have the same code.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(segment.inputs):
        copies[node] = graph.placeholder(f"in{i}")
        copies[node].meta = {name: node.meta[name] for name in ("val", "tensor_meta") if name in node.meta}
    for i, node in enumerate(segment.nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, f"made{i}")
        copies[node].meta = dict(node.meta)
    result = graph.output(tuple(copies[node] for node in segment.outputs))
    # Who reads them was compiled for the strides that the graph says.
    result.meta["user_visible_output_idxs"] = list(range(len(segment.outputs)))
    return fx.GraphModule(owner, graph)
