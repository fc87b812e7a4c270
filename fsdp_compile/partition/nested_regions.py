"""Nested regions (`torch.compiler.nested_compile_region`), which are traced and split once for all of their calls.

AOTAutograd asks for forward and backward of each region before it asks for those of the graph that calls it:

    forward     %a, %saved = region(%flat_0, %x); %b, %saved_1 = region(%flat_1, %a)
    backward    %g = region_backward(%saved_1, %grad); ...

Then the calls are inlined. Everything behind the partitioner sees the graphs that it would see without regions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import getitem

import torch
from torch import fx

from fsdp_compile._torch.tensors import memory_id
from fsdp_compile.ir.edit import infer_value
from fsdp_compile.ir.functions import inline, operands_of, region_calls, region_of
from fsdp_compile.ir.queries import is_alias


def is_of_nested_region(inputs: Sequence[object]) -> bool:
    """Whether a joint graph is that of a nested region, by the inputs that AOTAutograd passes for it: none."""
    return len(inputs) == 0


def pass_inputs_on(joint: fx.Graph) -> None:
    """Makes backward read what a region saves of its inputs from where forward has it, and not from the region.

    Flat parameters are among them, which backward knows by their records.
    """
    for call in region_calls(joint):
        region = region_of(call)
        operand = dict(zip(region.graph.find_nodes(op="placeholder"), operands_of(call), strict=True))
        (returned,) = region.graph.output_node().args
        for item in [user for user in call.users if user.target is getitem]:
            result = returned[item.args[1]]  # type: ignore[index]
            if result in operand:
                item.replace_all_uses_with(operand[result])
                joint.erase_node(item)


def inline_regions(gm: fx.GraphModule) -> None:
    """Inlines the calls of nested regions in a forward or a backward graph; its module is not recompiled."""
    calls = list(region_calls(gm.graph))
    callers = {call: stack for call in calls if (stack := _modules(call))}
    called = {_innermost(stack) for stack in callers.values()}
    for call in calls:
        for node in inline(call):
            _rename_modules(node, callers.get(call, {}), called)
    if calls:
        _follow_views(gm.graph)
        gm.graph.lint()


def _follow_views(graph: fx.Graph) -> None:
    """Gives views the memory of what they are views of now: a region was traced with inputs and results of its own.

    Inductor and AOTAutograd ask the memory of fake values what they may overwrite.
    """
    for node in graph.nodes:
        if is_alias(node) and _memory(node) != _memory(node.all_input_nodes[0]):
            node.meta["val"] = infer_value(node)


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) and value else value
    return memory_id(first) if isinstance(first, torch.Tensor) else None


_Modules = Mapping[str, tuple[str, type]]
"""The modules in which a node was traced, outermost first: path and class of each."""
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


def _modules(node: fx.Node) -> _Modules:
    return next((node.meta[name] for name in _STACKS if node.meta.get(name)), {})


def _innermost(modules: _Modules) -> tuple[str, type]:
    return list(modules.values())[-1]


def _rename_modules(node: fx.Node, caller: _Modules, called: Collection[tuple[str, type]]) -> None:
    """Says of the copy of a region's node that it is of the module that is called, and not of the one that was traced.

    Args:
        node: The copy.
        caller: The modules around the call; the last one is that whose forward is the region.
        called: The last ones of all calls.
    """
    if not caller:
        return
    for name in [name for name in _STACKS if node.meta.get(name)]:
        stack = list(node.meta[name].items())
        traced = [place for place, (_, module) in enumerate(stack) if module in called]
        if traced:
            (before, _), (now, _) = stack[traced[-1]][1], _innermost(caller)
            inner = {key: (now + path.removeprefix(before), kind) for key, (path, kind) in stack[traced[-1] + 1 :]}
            node.meta[name] = {**caller, **inner}
