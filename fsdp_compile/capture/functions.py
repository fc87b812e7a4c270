"""Takes reads of parameters out of the functions of control flow, where no pass would see them.

    true(%flat, %x):  %w = fsdp.unshard(%flat, spec); return %x @ %w
    cond(%p, true, false, (%flat, %x))

    true(%x, %w):  return %x @ %w
    %w = fsdp.unshard(%flat, spec)
    cond(%p, true, false, (%x, %w))

So every rank gathers the same parameters in the same order, whichever branch it takes and however often its loops run,
and each parameter is gathered and reduced once. Parameters of a branch that is not taken get zeros, as in one process.
Regions under `nested_compile_region` are inlined: each of their calls gathers parameters of its own.

This is done in Dynamo's graph, before autograd traces it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.tensors import HigherOrderOperator
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.source_line import source_line
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD

_UNSHARD = (torch.ops.fsdp.unshard, UNSHARD)
_INVOKE = "invoke_subgraph"
_CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map_impl")
"""Operators that end in a tuple of operands, which are the last arguments of all of their functions."""


def take_reads_out(gm: fx.GraphModule) -> None:
    """Moves reads out of the functions of control flow, and inlines regions that read, in a Dynamo graph."""
    changed = False
    for call in list(gm.graph.nodes):
        if not isinstance(call.target, HigherOrderOperator):
            continue
        functions = [_module(node) for node in _functions(call)]
        for function in functions:
            take_reads_out(function)
        if not any(map(_reads, functions)):
            continue
        if call.target.name() == _INVOKE:
            _inline(call, functions[0])
            changed = True
        elif call.target.name() in _CONTROL_FLOW:
            _hoist(call)
            changed = True
    if changed:
        gm.graph.lint()
        gm.recompile()


def refuse_hidden_reads(gm: fx.GraphModule) -> None:
    """Refuses a graph of AOTAutograd's in which another operator's function reads a parameter.

    Raises:
        UnsupportedModelError: With the line of the model that calls the operator.
    """
    for call in gm.graph.nodes:
        if isinstance(call.target, HigherOrderOperator) and any(_hides_markers(_module(f)) for f in _functions(call)):
            raise UnsupportedModelError(
                f"a function that is passed to torch.ops.higher_order.{call.target.name()} reads a parameter",
                where=source_line(call),
                instead="read it before (weight = self.weight), and use the local name in the function",
            )


def _functions(call: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments that are functions."""
    return [n for n in call.all_input_nodes if n.op == "get_attr" and isinstance(_value(n), fx.GraphModule)]


def _value(node: fx.Node) -> Any:
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _module(node: fx.Node) -> fx.GraphModule:
    value = _value(node)
    assert isinstance(value, fx.GraphModule)
    return value


def _reads(function: fx.GraphModule) -> list[fx.Node]:
    return [node for node in function.graph.nodes if node.op == "call_function" and node.target in _UNSHARD]


def _hides_markers(function: fx.GraphModule) -> bool:
    modules = [module for module in function.modules() if isinstance(module, fx.GraphModule)]
    return any(node.target in (*_UNSHARD, REDUCE_GRAD) for module in modules for node in module.graph.nodes)


def _add_attribute(graph: fx.Graph, name: str, value: Any) -> str:
    """Sets an attribute of a graph's module under a name that is free; returns that name."""
    gm: Any = graph.owning_module
    stem, number = name.replace(".", "_"), 0
    while hasattr(gm, f"{stem}_{number}"):
        number += 1
    setattr(gm, f"{stem}_{number}", value)
    return f"{stem}_{number}"


def _inline(call: fx.Node, function: fx.GraphModule) -> None:
    """Replaces the call of a region by its nodes."""
    operands = call.args[2:]  # after the function and its name
    copies: dict[fx.Node, Any] = dict(zip(function.graph.find_nodes(op="placeholder"), operands, strict=True))
    with call.graph.inserting_before(call):
        for node in function.graph.nodes:
            if node.op == "get_attr":
                copies[node] = call.graph.get_attr(_add_attribute(call.graph, str(node.target), _value(node)))
                copies[node].meta = dict(node.meta)
            elif node.op not in ("placeholder", "output"):
                copies[node] = call.graph.node_copy(node, copies.__getitem__)
    (returned,) = function.graph.output_node().args
    results: Any = fx.node.map_arg(returned, copies.__getitem__)
    for item in list(call.users):
        item.replace_all_uses_with(results[item.args[1]])
        call.graph.erase_node(item)
    _erase_call(call)


def _erase_call(call: fx.Node) -> None:
    functions = _functions(call)
    call.graph.erase_node(call)
    for function in functions:
        if not function.users:
            call.graph.erase_node(function)


def _hoist(call: fx.Node) -> None:
    """Moves the reads in the functions of a call to before it."""
    operands = list(call.args[-1])  # type: ignore[arg-type]
    # Several calls may share a function, and each has operands of its own.
    functions = {node: _copy(_module(node)) for node in _functions(call)}
    moved = [each for function in functions.values() for each in _movable_reads(function, operands)]
    outside: dict[tuple[Any, ...], fx.Node] = {}
    for read in moved:
        if read.outside not in outside:
            with call.graph.inserting_before(call):
                outside[read.outside] = call.graph.call_function(UNSHARD, read.outside)
            outside[read.outside].meta = dict(read.node.meta)
    for function in functions.values():
        added = {args: _add_argument(function, node) for args, node in outside.items()}
        for read in moved:
            if read.node.graph is function.graph:
                read.node.replace_all_uses_with(added[read.outside])
                function.graph.erase_node(read.node)
    operands.extend(outside.values())
    sources = {source for args in outside for source in args if isinstance(source, fx.Node)}
    unused = [
        i for i, operand in enumerate(operands) if operand in sources and not _is_used(functions.values(), operands, i)
    ]
    for function in functions.values():
        arguments = _arguments(function, len(operands))
        for index in unused:
            function.graph.erase_node(arguments[index])
        function.graph.lint()
        function.recompile()
    kept = tuple(operand for i, operand in enumerate(operands) if i not in unused)
    with call.graph.inserting_before(call):
        for node, function in functions.items():
            name = _add_attribute(call.graph, str(node.target), function)
            call.replace_input_with(node, call.graph.get_attr(name))
            if not node.users:
                call.graph.erase_node(node)
    call.args = (*call.args[:-1], kept)


@dataclasses.dataclass(frozen=True)
class _MovableRead:
    """A read in a function, and the arguments that it has outside of the function."""

    node: fx.Node
    outside: tuple[Any, ...]


def _movable_reads(function: fx.GraphModule, operands: Sequence[Any]) -> Iterator[_MovableRead]:
    outside = dict(zip(_arguments(function, len(operands)), operands, strict=True))
    for node in _reads(function):
        if all(source in outside for source in node.all_input_nodes):
            yield _MovableRead(node, fx.node.map_arg(node.args, outside.__getitem__))


def _copy(function: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    returned = graph.graph_copy(function.graph, {})
    graph.output(returned).meta.update(function.graph.output_node().meta)
    return fx.GraphModule(function, graph)


def _arguments(function: fx.GraphModule, operands: int) -> list[fx.Node]:
    """The placeholders of a function that are operands of its call: the last ones."""
    placeholders = list(function.graph.find_nodes(op="placeholder"))
    return placeholders[len(placeholders) - operands :]


def _add_argument(function: fx.GraphModule, like: fx.Node) -> fx.Node:
    """Adds a placeholder after the others, for a value such as `like`'s."""
    with function.graph.inserting_after(list(function.graph.find_nodes(op="placeholder"))[-1]):
        added = function.graph.placeholder(f"{like.name}_argument")
    added.meta = dict(like.meta)
    return added


def _is_used(functions: Iterable[fx.GraphModule], operands: Sequence[Any], index: int) -> bool:
    """Whether any function uses one operand."""
    return any(_arguments(function, len(operands))[index].users for function in functions)
