"""Plans of passes as text: what a pass decided, node by node, as people and golden tests read it.

PrefetchPlan
  moves
    Move: gather=%ag_1, anchor=%wait
    Move: gather=%ag_2, anchor=%wait_1
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

from torch import fx

from fsdp_compile.ir.graph import Record
from fsdp_compile.ir.text.names import spell_name, spell_parameter
from fsdp_compile.layout.spec import UnshardSpec


def format_plan(plan: Any) -> str:
    """The canonical text of a plan, ending in a line feed.

    A plan is a dataclass of nodes, numbers, strings, enums, records, further dataclasses, and tuples of those; fields
    that its `repr` leaves out are left out. Nodes are shown by name, so the text may be made before or after the plan
    is applied.
    """
    return "\n".join(_lines(plan, 0)) + "\n"


def _lines(value: Any, depth: int) -> Iterator[str]:
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
                yield from _lines(item, depth + 2)


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
