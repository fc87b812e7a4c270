"""Graphs and plans as text.

A graph has one canonical line per node, with its type and our record:

    graph forward on cuda
    %flat = input(role=flat, unit=layers.0) : f32[64]
      .weight: offset=0 extent=64 shape=16x8 dim=0 over=fsdp.shard.0/2 param=bfloat16 reduce=float32 ...
    %ag = all_gather(%shard, 2, 'fsdp.shard.0', role=gather, unit=layers.0, of=[.weight]) : bf16[128]

The text is the same on every rank and has no memory addresses. Nodes have the names that they have in the graph, so
that a moved node is a moved line. `parser.py` reads it back; docs/invariants.md has the grammar.

A plan of a pass is what it decided, node by node, as people and golden tests read it:

    PrefetchPlan
      moves
        Move: gather=%ag_1, anchor=%wait
        Move: gather=%ag_2, anchor=%wait_1
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile.ir.graph import DECLARING, Record, Role, StepGraph, record_of
from fsdp_compile.ir.queries import GRADIENTS_OF_READS, TEXT_POSITION, read_text
from fsdp_compile.ir.text.spelling import (
    Size,
    spell_dtype,
    spell_name,
    spell_operator,
    spell_parameter,
    spell_size,
    spell_symbols,
    spell_word,
)
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops.embedding import AVERAGE_ROWS, LOOK_UP
from fsdp_compile.ops.unshard import UNSHARD


def format_graph(step: StepGraph) -> str:
    """The canonical text of a graph, ending in a line feed."""
    device = main_device(step)
    lines = [f"graph {step.phase.value} on {device}"]
    lines += [f"symbol {line}" for line in spell_symbols(_sizes(step))]
    for node in step.graph.nodes:
        lines += format_node(node, device)
    return "\n".join(lines) + "\n"


def main_device(step: StepGraph) -> str:
    """The kind of device that a graph runs on: that of its first flat parameter, else of its first tensor."""
    inputs = [n for n in step.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
    flat = next(step.nodes(Role.FLAT), inputs[0] if inputs else None)
    return "cpu" if flat is None else flat.meta["val"].device.type


def format_node(node: fx.Node, device: str) -> list[str]:
    """The line of one node; an input of ours has one more, indented, for each of its parameters.

    `device` is the kind of device that types need not mention.
    """
    if node.op == "output":
        return [f"return {_value(node.args[0])}"]
    line = f"%{node.name} = {_head(node)}({', '.join(_arguments(node))}) : {node_type(node, device)}"
    record = record_of(node)
    if record is None or not _declares(node, record):
        return [line]
    slots = zip(record.parameters, record.specs, strict=True)
    return [line, *(f"  {spell_parameter(name, record.unit)}: {spec.text}" for name, spec in slots)]


def node_type(node: fx.Node, device: str) -> str:
    """The type of a node's result; `?` if the graph does not know."""
    return spell_type(node.meta["val"], device) if "val" in node.meta else "?"


def spell_type(value: Any, device: str) -> str:  # noqa: PLR0911  one line per kind
    """The type of a result: `f32[4, s33]`, `f32[4, 8] strides [1, 4] on cpu`, `sym(s33)`, `[f32[8], f32[8]]`, `none`.

    `device` is the kind of device that is not mentioned.
    """
    match value:
        case torch.Tensor():
            return _tensor_type(value, device)
        case torch.SymInt():
            return f"sym({spell_size(value)})"
        case torch.SymFloat() | torch.SymBool():
            return f"{type(value).__name__.lower()}({value.node.expr})"
        case bool() | int() | float() | str():
            return f"{type(value).__name__}({value!r})"
        case None:
            return "none"
        case list():
            return f"[{', '.join(spell_type(v, device) for v in value)}]"
        case tuple():
            return f"({', '.join(spell_type(v, device) for v in value)})"
    return f"<{type(value).__name__}>"


def _tensor_type(value: torch.Tensor, device: str) -> str:
    if value.layout is not torch.strided:
        return f"<{str(value.layout).removeprefix('torch.')} tensor>"
    text = f"{spell_dtype(value.dtype)}[{', '.join(map(spell_size, value.shape))}]"
    strides = [spell_size(s) for s in value.stride()]
    if strides != [spell_size(s) for s in contiguous_strides(value.shape)]:
        text += f" strides [{', '.join(strides)}]"
    return text if value.device.type == device else f"{text} on {value.device.type}"


def contiguous_strides(shape: torch.Size) -> list[Size]:
    """Strides, in elements, of a contiguous tensor."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * torch.sym_max(size, 1)
    return strides


def _sizes(step: StepGraph) -> Iterator[torch.SymInt]:
    for node in step.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            found = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
            yield from (size for size in found if isinstance(size, torch.SymInt))


def _head(node: fx.Node) -> str:
    match node.op:
        case "placeholder":
            return "input"
        case "get_attr":
            return "attribute"
        case "call_function":
            return spell_operator(node.target)
    return f"{node.op}.{node.target}"


def _arguments(node: fx.Node) -> Iterator[str]:
    slot = _slot(node)
    if node.op == "get_attr":
        yield repr(node.target)
    elif node.op != "placeholder":
        skipped = None if slot is None else TEXT_POSITION[node.target]
        yield from (_value(value) for position, value in enumerate(node.args) if position != skipped)
    if slot is not None:
        yield f"slot={slot}"
    for key, value in node.kwargs.items():
        yield f"{key}={_value(value)}"
    yield from _record(node)


def _slot(node: fx.Node) -> str | None:
    """The parameter of a marker or lookup, which is shown instead of the text of its spec."""
    if node.target is AVERAGE_ROWS:
        record = record_of(node)
    elif node.target in (UNSHARD, LOOK_UP, *GRADIENTS_OF_READS) and isinstance(node.args[0], fx.Node):
        record = record_of(node.args[0])
    else:
        return None
    if record is None:
        return None
    places: dict[Any, str] = {spec.text: name for name, spec in zip(record.parameters, record.specs, strict=True)}
    text = read_text(node)
    return spell_parameter(places[text], record.unit) if text in places else None


def _record(node: fx.Node) -> Iterator[str]:
    record: Record | None = record_of(node)
    if record is None:
        return
    yield f"role={record.role.value}"
    if _declares(node, record):
        yield f"unit={spell_name(record.unit)}"
        return
    for unit, claims in itertools.groupby(record.claims, lambda claim: claim[0]):
        yield f"unit={spell_name(unit)}"
        yield f"of=[{', '.join(spell_parameter(name, unit) for _, name in claims)}]"


def _declares(node: fx.Node, record: Record) -> bool:
    """Whether a node says where the parameters of its record lie."""
    return node.op == "placeholder" and record.role in DECLARING


def _value(value: Any) -> str:  # noqa: PLR0911  one line per kind
    word = spell_word(value)
    if word is not None:
        return word
    match value:
        case fx.Node():
            return f"%{value.name}"
        case tuple():
            return f"({', '.join(map(_value, value))}{',' * (len(value) == 1)})"
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case torch.SymInt():
            return f"sym({spell_size(value)})"
        case None | bool() | int() | float() | str():
            return repr(value)
    return f"<{type(value).__name__}>"


def format_plan(plan: Any) -> str:
    """The canonical text of a plan, ending in a line feed.

    A plan is a dataclass of nodes, numbers, strings, enums, records, further dataclasses, and tuples of those; fields
    that its `repr` leaves out are left out. Nodes are shown by name, so the text may be made before or after the plan
    is applied.
    """
    return "\n".join(_plan_lines(plan, 0)) + "\n"


def _plan_lines(value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if not _is_plan(value):
        yield indent + _inline(value)
        return
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
    inline = [f"{name}={_inline(v)}" for name, v in fields.items() if not _is_nested(v)]
    yield indent + type(value).__name__ + (f": {', '.join(inline)}" if inline else "")
    for name, nested in fields.items():
        if _is_nested(nested):
            yield f"{indent}  {name}"
            for item in nested if isinstance(nested, (tuple, list)) else [nested]:
                yield from _plan_lines(item, depth + 2)


def _is_plan(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, (Record, UnshardSpec))


def _is_nested(value: Any) -> bool:
    """Whether a value takes lines of its own."""
    return _is_plan(value) or (isinstance(value, (tuple, list)) and any(_is_plan(v) for v in value))


def _inline(value: Any) -> str:
    match value:
        case fx.Node():
            return f"%{value.name}"
        case Record():
            return f"{spell_name(value.unit)}[{', '.join(spell_parameter(p, value.unit) for p in value.parameters)}]"
        case UnshardSpec():
            return f"({value.text})"
        case enum.Enum():
            return str(value.value)
        case tuple() | list():
            return f"[{', '.join(map(_inline, value))}]"
    return str(value)
