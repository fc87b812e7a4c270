"""Complaints about a graph as text: what is wrong, where in the graph and in the user's program, and what to check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile.ir.graph import StepGraph, record_of
from fsdp_compile.ir.source_line import source_line


@dataclasses.dataclass(frozen=True)
class Complaint:
    """One place where a graph breaks one rule."""

    rule: str
    node: fx.Node  # where; the graph's output node if it is about the graph as a whole
    what: str  # what is wrong there, in one sentence
    hint: str  # what to check, or what the right graph would have


Finding = tuple[fx.Node, str, str]
"""`node`, `what` and `hint` of a complaint, as a rule finds them."""
SHOWN = 3
"""Complaints that are printed in full; the others are counted."""
NEIGHBOURS = 3
"""Nodes that are printed before and after the one that breaks the rule."""
_LONGEST_LINE = 160


def summary(step: StepGraph, complaints: Sequence[Complaint], after: str) -> str:
    """One line per complaint that is shown, under a line that names the last pass."""
    lines = [f"the {step.phase.value} graph is wrong after {after}"]
    lines += [f"  {c.rule}: %{c.node} {c.what}" for c in complaints[:SHOWN]]
    if len(complaints) > SHOWN:
        rest = sorted({c.rule for c in complaints[SHOWN:]})
        lines.append(f"  and {len(complaints) - SHOWN} more ({', '.join(rest)})")
    return "\n".join(lines)


def where(step: StepGraph, complaints: Sequence[Complaint]) -> str:
    """The neighbourhood of each node that breaks a rule, and the user's line that it serves."""
    nodes = list(step.graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    lines = []
    for node in dict.fromkeys(c.node for c in complaints[:SHOWN]):
        lines.append(f"%{node}, for {source_line(node)}")
        place = order[node]
        near = nodes[max(place - NEIGHBOURS, 0) : place + NEIGHBOURS + 1]
        lines += [f"    {'>' if other is node else ' '} {describe(other)}" for other in near]
    return "\n".join(lines)


def hint(complaints: Sequence[Complaint]) -> str:
    """What the right graph would have, for each complaint that is shown."""
    return "; ".join(dict.fromkeys(f"{c.rule}: {c.hint}" for c in complaints[:SHOWN]))


def describe(node: fx.Node) -> str:
    """One node in one line: name, operator, arguments, type, role and unit."""
    operator = node.op if node.op != "call_function" else getattr(node.target, "__name__", str(node.target))
    arguments = ", ".join(_argument(value) for value in node.args)
    record = record_of(node)
    role = "" if record is None else f"  {{{record.role.value} of {record.unit}}}"
    value, kind = node.meta.get("val"), ""
    if isinstance(value, torch.Tensor):
        kind = f" : {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    line = f"%{node} = {operator}({arguments}){kind}{role}"
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."


def _argument(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_argument(item) for item in value) + "]"
    return f"%{value}" if isinstance(value, fx.Node) else repr(value)
