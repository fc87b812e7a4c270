"""Takes reads of parameters out of the functions of control flow, where no pass would see them.

    true(%flat, %x):  %w = fsdp_compile.unshard(%flat, spec); return %x @ %w
    cond(%p, true, false, (%flat, %x))

    true(%x, %w):  return %x @ %w
    %w = fsdp_compile.unshard(%flat, spec)
    cond(%p, true, false, (%x, %w))

So every rank gathers the same parameters in the same order, whichever branch it takes and however often its loops run,
and each parameter is gathered and reduced once. Parameters of a branch that is not taken get zeros, as in one process.
A region under `nested_compile_region` that is called more than once is refused: torch 2.13 traces it for its first call
alone, and guards on too little of what its other calls find.

This is done in Dynamo's graph, before autograd traces it.

Calls of sharded modules by `torch.func.functional_call` are left to Python: it registers values for the time of the
call, and Dynamo does not compare what is registered with what a marker reads, which would take a guard for each
parameter. Around compiled code, in uncompiled code and after a graph break the values are read. So the frame whose
graph has such a call runs in Python, and what it calls is compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.utils import stateless

from fsdp_compile._torch.dynamo import leave_to_python
from fsdp_compile._torch.tensors import HigherOrderOperator
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.queries import aliases, function_at, functions_of
from fsdp_compile.ir.source_line import frames_of, source_line
from fsdp_compile.ops.unshard import REDUCE_GRAD, UNSHARD

READS = (torch.ops.fsdp_compile.unshard, UNSHARD)
"""Targets of the calls that read a parameter: those of Dynamo's graph, and of AOTAutograd's."""
_CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map_impl")
"""Operators that end in a tuple of operands, which are the last arguments of all of their functions."""


def take_reads_out(gm: fx.GraphModule) -> None:
    """Moves reads out of the functions of control flow in a Dynamo graph, or in a function in it.

    Raises `UnsupportedModelError` for a region under `torch.compiler.nested_compile_region`.
    """
    changed = False
    for call in list(gm.graph.nodes):
        if not isinstance(call.target, HigherOrderOperator):
            continue
        if call.target.name() == "invoke_subgraph":
            raise UnsupportedModelError(
                "a block is under torch.compiler.nested_compile_region",
                where=source_line(call),
                instead="remove nested_compile_region; options={'regions': 'blocks'} compiles like blocks once",
            )
        functions = [function_at(node) for node in functions_of(call)]
        for function in functions:
            take_reads_out(function)
        if call.target.name() in _CONTROL_FLOW and any(map(reads_in, functions)):
            _hoist(call)
            changed = True
    if changed:
        gm.graph.lint()
        gm.recompile()


def refuse_hidden_reads(gm: fx.GraphModule) -> None:
    """Raises `UnsupportedModelError` if the function of another operator reads a parameter in AOTAutograd's graph."""
    for call in gm.graph.nodes:
        if not isinstance(call.target, HigherOrderOperator):
            continue
        inside = (part for function in functions_of(call) for part in function_at(function).modules())
        nodes = (node for part in inside if isinstance(part, fx.GraphModule) for node in part.graph.nodes)
        if any(node.target in (*READS, REDUCE_GRAD) for node in nodes):
            raise UnsupportedModelError(
                f"a function that is passed to torch.ops.higher_order.{call.target.name()} reads a parameter",
                where=source_line(call),
                instead="read it before (weight = self.weight), and use the local name in the function",
            )


def refuse_places_in_storage(gm: fx.GraphModule) -> None:
    """Raises `UnsupportedModelError` for a view of a parameter from a place in its storage, which is a message's."""
    for view in aliases(node for node in gm.graph.nodes if node.target in READS):
        if view.target is torch.ops.aten.as_strided.default and view.args[3:] not in ((), (None,)):
            raise UnsupportedModelError(
                "torch.as_strided() of a parameter is given a storage_offset, which counts from the start of memory "
                "that the parameter shares with others",
                where=source_line(view),
                instead="slice the flattened parameter, and take a view of that without an offset",
            )


def leave_functional_call(gm: fx.GraphModule) -> None:
    """Leaves a frame to Python if `functional_call` in its Dynamo graph calls what reads a sharded parameter.

    By an exception that tells Dynamo so, or by `UnsupportedModelError` where `fullgraph=True` was asked for.
    """
    what = "torch.func.functional_call() of a sharded module is compiled, where the given values would be ignored"
    for read in (node for part in gm.modules() if isinstance(part, fx.GraphModule) for node in reads_in(part)):
        inside = [frame for frame in frames_of(read) if frame.file == stateless.__file__]
        # Reads before the call only find out which parameters are tied.
        if inside and inside[-1].function == "_functional_call":
            where = source_line(read, that_calls=stateless.__file__)
            raise leave_to_python(f"fsdp_compile: {what} ({where})") or UnsupportedModelError(
                what,
                where=where,
                instead="fullgraph=False, or functional_call() in a function under @torch.compiler.disable",
            )


def reads_in(function: fx.GraphModule) -> list[fx.Node]:
    """The reads of parameters in a function of Dynamo's."""
    return [node for node in function.graph.nodes if node.op == "call_function" and node.target in READS]


def returned_reads(gm: fx.GraphModule) -> list[int]:
    """The positions of parameters among the results of a Dynamo graph."""
    results: Any = gm.graph.output_node().args[0]
    return [i for i, node in enumerate(results) if isinstance(node, fx.Node) and node.target in READS]


def _hoist(call: fx.Node) -> None:
    """Moves the reads in the functions of a call to before it."""
    operands = list(call.args[-1])  # type: ignore[arg-type]
    # Several calls may share a function, and each has operands of its own.
    functions = {node: _copy(function_at(node)) for node in functions_of(call)}
    moved = [each for function in functions.values() for each in _movable_reads(function, operands)]
    outside: dict[tuple[Any, ...], fx.Node] = {}
    for read, args in moved:
        if args not in outside:
            with call.graph.inserting_before(call):
                outside[args] = call.graph.call_function(UNSHARD, args)
            outside[args].meta = dict(read.meta)
    for function in functions.values():
        added = {args: _add_argument(function, node) for args, node in outside.items()}
        for read, args in moved:
            if read.graph is function.graph:
                read.replace_all_uses_with(added[args])
                function.graph.erase_node(read)
    operands.extend(outside.values())
    sources = {source for args in outside for source in args if isinstance(source, fx.Node)}
    taken = [_arguments(function, len(operands)) for function in functions.values()]
    unused = [i for i, each in enumerate(operands) if each in sources and not any(inner[i].users for inner in taken)]
    for function, inner in zip(functions.values(), taken, strict=True):
        for index in unused:
            function.graph.erase_node(inner[index])
        function.graph.lint()
        function.recompile()
    kept = tuple(operand for i, operand in enumerate(operands) if i not in unused)
    gm: Any = call.graph.owning_module
    with call.graph.inserting_before(call):
        for node, function in functions.items():
            stem = str(node.target).replace(".", "_")
            name = next(name for number in itertools.count() if not hasattr(gm, name := f"{stem}_{number}"))
            setattr(gm, name, function)
            call.replace_input_with(node, call.graph.get_attr(name))
            if not node.users:
                call.graph.erase_node(node)
    call.args = (*call.args[:-1], kept)


def _movable_reads(function: fx.GraphModule, operands: Sequence[Any]) -> list[tuple[fx.Node, tuple[Any, ...]]]:
    """The reads in a function, and the arguments that each has outside of it."""
    outside = dict(zip(_arguments(function, len(operands)), operands, strict=True))
    reads = (node for node in reads_in(function) if outside.keys() >= {*node.all_input_nodes})
    return [(node, fx.node.map_arg(node.args, outside.__getitem__)) for node in reads]


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
