"""Refuses in-place changes of parameters inside a compiled region, which would be lost or seen too late.

A read gives a copy, so what is written into it is lost. The DTensor that `parameters()` gives under `no_grad()` is the
sharded parameter itself, but a graph that also reads the flat parameter does not know that they share memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch.tensors import memory_id
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.runtime.units import FSDPParamGroup

_OPERATORS: tuple[Callable[..., Any], ...] = (
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ipow,
    operator.imatmul,
)


def refuse_updates(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Refuses a Dynamo graph that writes into a gathered parameter, or into one that it also reads.

    Raises:
        UnsupportedModelError: If there is such a write, with the line of the model that makes it.
    """
    names = _read_parameters(inputs)
    guarded: dict[int, str] = {}
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if id(value) in names:
            guarded |= {key: names[id(value)] for key in _memory(node)}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in (torch.ops.fsdp.unshard, UNSHARD):
            guarded |= dict.fromkeys(_memory(node), "a gathered parameter")
        elif _writes(node) and isinstance(node.args[0], fx.Node):
            written = next((guarded[key] for key in _memory(node.args[0]) if key in guarded), None)
            if written is not None:
                raise _refusal(node, written)


def _read_parameters(inputs: Sequence[object]) -> dict[int, str]:
    """`id` of each parameter whose flat parameter is an input, with its description for errors."""
    flats = [FSDPParamGroup.of(value) for value in inputs if isinstance(value, torch.Tensor)]
    return {
        id(slot.parameter): f"a parameter of {flat.unit.title}"
        for flat in flats
        if flat is not None
        for slot in flat.params
    }


def _memory(node: fx.Node) -> Iterator[int]:
    """Ids of the memory of a node's tensors."""
    for value in tree_leaves(node.meta.get("example_value")):
        if isinstance(value, torch.Tensor):
            yield memory_id(value)


def _writes(node: fx.Node) -> bool:
    if not node.args:
        return False
    if node.op == "call_method":
        return _is_in_place(str(node.target))
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    return node.target in _OPERATORS or _is_in_place(name)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and name != "requires_grad_"


def _refusal(node: fx.Node, written: str) -> UnsupportedModelError:
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    where = " ".join(line.strip() for line in lines[-2:]) or node.name
    return UnsupportedModelError(
        f"the compiled forward changes {written} in place, which would be lost",
        where=where,
        instead="do it between steps, or in a function under @torch.compiler.disable and torch.no_grad() that takes "
        "the parameter from parameters()",
    )
