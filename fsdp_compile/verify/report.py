"""Complaints about a graph as text: what is wrong, where in the graph and in the user's program, and what to check."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fsdp_compile.errors import InvariantError
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


def refusal(step: StepGraph, complaints: Sequence[Complaint], after: str) -> InvariantError:
    """The error for a graph: rule, node, neighbourhood, the user's line and hint of the first complaints.

    `after` is the name of the pass that ran last.
    """
    shown, rest = complaints[:SHOWN], complaints[SHOWN:]
    what = [f"the {step.phase.value} graph is wrong after {after}"]
    what += [f"  {c.rule}: %{c.node} {c.what}" for c in shown]
    what += [f"  and {len(rest)} more ({', '.join(sorted({c.rule for c in rest}))})"] if rest else []
    nodes = list(step.graph.nodes)
    where = []
    for node in dict.fromkeys(c.node for c in shown):
        where.append(f"%{node}, for {source_line(node)}")
        place = nodes.index(node)
        near = nodes[max(place - NEIGHBOURS, 0) : place + NEIGHBOURS + 1]
        where += [f"    {'>' if other is node else ' '} {describe(other)}" for other in near]
    hints = dict.fromkeys(f"{c.rule}: {c.hint}" for c in shown)
    return InvariantError("\n".join(what), where="\n".join(where), instead="; ".join(hints))


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
