"""Graphs and plans as text, and what differs between two graphs.

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
        Move: start=%ag_1, anchor=%wait
        Move: start=%ag_2, anchor=%wait_1
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import itertools
import operator
import re
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile._torch.distributed import collectives
from fsdp_compile._torch.tensors import dtype_abbrs, make_contiguous_strides_for
from fsdp_compile.ir.graph import DECLARING, Record, Role, StepGraph, record_of
from fsdp_compile.ir.queries import GRADIENTS_OF_READS, TEXT_POSITION, read_text
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.ops.embedding import AVERAGE_ROWS, LOOK_UP
from fsdp_compile.ops.unshard import UNSHARD

DTYPES: Final[dict[torch.dtype, str]] = {**dtype_abbrs, torch.bool: "bool"}
"""Torch's short names, but for that of booleans; other dtypes have their own."""
OPERATORS: Final[dict[Any, str]] = {
    operator.getitem: "getitem",
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.all_gather_into_tensor_coalesced.default: "all_gather_coalesced",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.reduce_scatter_tensor_coalesced.default: "reduce_scatter_coalesced",
    collectives.all_reduce.default: "all_reduce",
    collectives.all_reduce_coalesced.default: "all_reduce_coalesced",
    collectives.wait_tensor.default: "wait",
}
"""Operators with a name of their own; all others go by their qualified name, `aten.mm` or `aten.slice.Tensor`."""
_BARE_NAME: Final = re.compile(r"[\w.\-/]+|\(root\)")
Size = int | torch.SymInt


def format_graph(step: StepGraph) -> str:
    """The canonical text of a graph, ending in a line feed."""
    inputs = [n for n in step.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
    first = next(step.nodes(Role.FLAT), inputs[0] if inputs else None)
    device = "cpu" if first is None else first.meta["val"].device.type
    lines = [f"graph {step.phase.value} on {device}", *_symbols(step)]
    for node in step.graph.nodes:
        lines += format_node(node, device)
    return "\n".join(lines) + "\n"


def format_diff(before: str, after: str) -> str:
    """What differs between two texts of `format_graph`, as a unified diff without context; empty if nothing does."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=0)
    return "".join(f"{line}\n" for line in lines)


def format_node(node: fx.Node, device: str) -> list[str]:
    """The line of one node; an input of ours has one more, indented, for each of its parameters.

    `device` is the kind of device that types need not mention.
    """
    if node.op == "output":
        return [f"return {_value(node.args[0])}"]
    kind = {"placeholder": "input", "get_attr": "attribute"}.get(node.op) or _operator(node.target)
    result = spell_type(node.meta["val"], device) if "val" in node.meta else "?"
    line = f"%{node.name} = {kind}({', '.join(_arguments(node))}) : {result}"
    record = record_of(node)
    if record is None or not _declares(node, record):
        return [line]
    slots = zip(record.parameters, record.specs, strict=True)
    return [line, *(f"  {_parameter(name, record.unit)}: {spec.text}" for name, spec in slots)]


def spell_type(value: Any, device: str) -> str:  # noqa: PLR0911  one line per kind
    """The type of a result: `f32[4, s33]`, `f32[4, 8] strides [1, 4] on cpu`, `sym(s33)`, `[f32[8], f32[8]]`, `none`.

    `device` is the kind of device that is not mentioned.
    """
    match value:
        case torch.Tensor() if value.layout is not torch.strided:
            return f"<{_without_module(value.layout)} tensor>"
        case torch.Tensor():
            text = f"{_dtype(value.dtype)}[{_sizes(value.shape)}]"
            strides = _sizes(value.stride())
            text += f" strides [{strides}]" * (strides != _sizes(make_contiguous_strides_for(value.shape)))
            return text + f" on {value.device.type}" * (value.device.type != device)
        case torch.SymInt():
            return _value(value)
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


def _without_module(constant: object) -> str:
    return str(constant).removeprefix("torch.")


def _dtype(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype) or _without_module(dtype)


def _sizes(sizes: tuple[Size, ...] | list[Size]) -> str:
    return ", ".join(str(size.node.expr) if isinstance(size, torch.SymInt) else str(size) for size in sizes)


def _symbols(step: StepGraph) -> list[str]:
    """One line per symbol in the sizes of a graph, sorted by name."""
    # Ranges alone: example sizes ("hints") may differ between ranks.
    ranges: dict[str, str] = {}
    for value in tree_leaves([node.meta.get("val") for node in step.graph.nodes]):
        for size in [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]:
            for symbol in size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ():
                known = size.node.shape_env.var_to_range.get(symbol)
                bounds = (0, "oo") if known is None else (known.lower, known.upper)
                ranges.setdefault(str(symbol), "[{}, {}]".format(*(str(b).replace("int_oo", "oo") for b in bounds)))
    return [f"symbol {name} in {ranges[name]}" for name in sorted(ranges)]


def _operator(target: Any) -> str:
    if target in OPERATORS:
        return OPERATORS[target]
    if isinstance(target, type(torch.ops.aten.mm.default)):
        return str(target).removesuffix(".default")
    if getattr(target, "namespace", None) == "higher_order":
        return f"higher_order.{target}"
    module = getattr(target, "__module__", type(target).__module__)
    return f"{'operator' if module == '_operator' else module}.{getattr(target, '__name__', type(target).__name__)}"


def _name(name: str) -> str:
    """The name of a unit or parameter, in quotes if it has characters that mean something else."""
    return name if _BARE_NAME.fullmatch(name) else repr(name)


def _parameter(name: str, unit: str) -> str:
    """A parameter's name below its unit: `.attention.weight` in unit `layers.0`."""
    return _name(name.removeprefix(unit) if name.startswith(unit + ".") else name)


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
    record = record_of(node)
    if record is None:
        return
    yield f"role={record.role.value}"
    if _declares(node, record):
        yield f"unit={_name(record.unit)}"
        return
    for unit, claims in itertools.groupby(record.claims, lambda claim: claim[0]):
        yield f"unit={_name(unit)}"
        yield f"of=[{', '.join(_parameter(name, unit) for _, name in claims)}]"


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
    return _parameter(places[text], record.unit) if text in places else None


def _declares(node: fx.Node, record: Record) -> bool:
    """Whether a node says where the parameters of its record lie."""
    return node.op == "placeholder" and record.role in DECLARING


def _value(value: Any) -> str:  # noqa: PLR0911  one line per kind
    match value:
        case fx.Node():
            return f"%{value.name}"
        case tuple():
            return f"({', '.join(map(_value, value))}{',' * (len(value) == 1)})"
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case torch.SymInt():
            return f"sym({_sizes([value])})"
        case torch.dtype():
            return _dtype(value)
        case torch.device():  # without its index, which differs between ranks
            return value.type
        case torch.memory_format() | torch.layout():
            return _without_module(value)
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
            return f"{_name(value.unit)}[{', '.join(_parameter(p, value.unit) for p in value.parameters)}]"
        case UnshardSpec():
            return f"({value.text})"
        case enum.Enum():
            return str(value.value)
        case tuple() | list():
            return f"[{', '.join(map(_inline, value))}]"
    return str(value)
