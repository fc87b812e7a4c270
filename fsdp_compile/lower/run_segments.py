"""Runs a graph whose segments are compiled: each value is dropped before the call that reads it last."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from fsdp_compile.lower.compiled_step import Compiled
from fsdp_compile.lower.segments import Segment


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
