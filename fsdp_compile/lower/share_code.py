"""Compiles a planned graph in segments, each kind of them once, and runs it: layers that are alike share their code.

Each value is dropped before the call that reads it last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.dynamo import compiled_in_parts
from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.lower.segments import Segment, cut, graph_of, has_open_sizes, text_of

CompileOne = Callable[[fx.GraphModule, Sequence[Any]], Compiled]


def can_share_code(graph: fx.Graph) -> bool:
    """Whether a graph can be compiled in segments: its sizes are numbers, and only tensors go between them."""
    crossing = [node for part in cut(graph) if isinstance(part, Segment) for node in (*part.inputs, *part.outputs)]
    return not has_open_sizes(graph) and all(isinstance(node.meta.get("val"), torch.Tensor) for node in crossing)


def compile_segments(gm: fx.GraphModule, compile_one: CompileOne) -> Compiled:
    """Compiles a graph for which `can_share_code` holds.

    Args:
        gm: After all passes.
        compile_one: Compiles a graph for inputs of these types.
    """
    known: dict[str, Compiled] = {}
    parts: list[tuple[Segment, Compiled] | fx.Node] = []
    (output,) = gm.graph.find_nodes(op="output")
    results = [value.meta.get("val") if isinstance(value, fx.Node) else None for value in output.args[0]]
    with compiled_in_parts([made.stride() if isinstance(made, torch.Tensor) else None for made in results]):
        for part in cut(gm.graph):
            if isinstance(part, fx.Node):
                parts.append(part)
                continue
            text = text_of(part)
            if text not in known:
                known[text] = compile_one(graph_of(part, gm), [node.meta["val"] for node in part.inputs])
            parts.append((part, known[text]))
    return runner(gm.graph, parts)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A segment's code, and what it reads and makes.

    Attributes:
        inputs: Names, and whether this is the last read of the value.
        outputs: Names.
    """

    code: Compiled
    inputs: tuple[tuple[str, bool], ...]
    outputs: tuple[str, ...]

    def run(self, values: dict[str, Any]) -> None:
        """Replaces values that are read for the last time by those that are made."""
        arguments = [values.pop(name) if is_last else values[name] for name, is_last in self.inputs]
        values.update(zip(self.outputs, self.code(arguments), strict=True))


@dataclasses.dataclass(frozen=True)
class _Operator:
    """A node that is run as it is, and the values that nothing reads after it."""

    node: fx.Node
    dropped: tuple[str, ...]

    def run(self, values: dict[str, Any]) -> None:
        """Calls the operator."""
        node = self.node
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: values[each.name])
        values[node.name] = node.target(*args, **kwargs)  # type: ignore[operator]
        del args, kwargs
        for name in self.dropped:
            del values[name]


def runner(graph: fx.Graph, parts: Sequence[tuple[Segment, Compiled] | fx.Node]) -> Compiled:
    """A callable that takes its arguments in a list and empties it, as compiled graphs do.

    Args:
        graph: The whole graph.
        parts: What it consists of, in order; segments with their code.
    """
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    kept = {node.name for node in output.all_input_nodes}
    steps = _steps(parts, kept)
    unused = set(inputs) - kept - {name for part in parts for name in _sources(part)}

    def run(args: list[Any]) -> Any:
        values = dict(zip(inputs, args, strict=True))
        args.clear()
        for name in unused:
            del values[name]
        for step in steps:
            step.run(values)
        return fx.node.map_arg(returned, lambda node: values[node.name])

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _sources(part: tuple[Segment, Compiled] | fx.Node) -> list[str]:
    nodes = part.all_input_nodes if isinstance(part, fx.Node) else part[0].inputs
    return [node.name for node in nodes]


def _steps(parts: Sequence[tuple[Segment, Compiled] | fx.Node], kept: set[str]) -> list[_Call | _Operator]:
    steps: list[_Call | _Operator] = []
    read = set(kept)
    for part in reversed(parts):
        sources = _sources(part)
        last = {name for name in sources if name not in read}
        if isinstance(part, fx.Node):
            never = [] if part.name in read else [part.name]  # a wait that nothing reads, say
            steps.append(_Operator(part, (*sorted(last), *never)))
        else:
            segment, code = part
            outputs = tuple(node.name for node in segment.outputs)
            steps.append(_Call(code, tuple((name, name in last) for name in sources), outputs))
        read |= last
    return steps[::-1]
