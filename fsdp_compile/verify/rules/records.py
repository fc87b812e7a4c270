"""markers-gone, typed, nothing-rank-specific: what must be written, and must not be written, on our nodes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from operator import getitem
from typing import Any

import torch
from torch import fx

from fsdp_compile._torch.tensors import tree_leaves
from fsdp_compile.ir.graph import INPUTS, ITEMS, STARTS, WAITS, Record, Role, record_of, role_of
from fsdp_compile.verify.facts import KIND_OF_ROLE, KINDS, WAIT, Facts
from fsdp_compile.verify.report import Finding

ALIAS_PREFIX = "fsdp."
_MARKERS = (
    "fsdp_compile::unshard",
    "fsdp_compile::reduce_grad",
    "fsdp_compile::reduce_rows",
    "fsdp_compile::shard_post_forward",
    "fsdp_compile::unshard_post_forward",
)
_ROLE_OF_NAME = {
    "fsdp_compile::reshard": Role.RESHARD,
    "fsdp_compile::update": Role.UPDATE,
    "fsdp_compile::look_up": Role.LOOK_UP,
    "fsdp_compile::average_rows": Role.AVERAGE_ROWS,
}
_ROLE_OF_KIND = {kind: role for role, kind in KIND_OF_ROLE.items()}
_ITEM_OF = dict(zip(STARTS, ITEMS, strict=True))
_WAIT_OF = dict(zip((*STARTS, *ITEMS), WAITS * 2, strict=True))
_RESERVED = {
    *_ROLE_OF_KIND.values(), *_ITEM_OF.values(), *_WAIT_OF.values(), *INPUTS,
    Role.RESHARD, Role.UPDATE, Role.LOOK_UP,
}  # fmt: skip
_PORTABLE = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.SymInt)


def markers_gone(facts: Facts) -> Iterator[Finding]:
    """Finds reads and gradients that no pass has turned into collectives."""
    hint = "insert-collectives turns every fsdp_compile.unshard and fsdp_compile.reduce_grad into collectives"
    for node in facts.nodes:
        if node.op == "call_function" and _qualified_name(node.target) in _MARKERS:
            yield node, "is a marker that no pass has replaced", hint


def typed(facts: Facts) -> Iterator[Finding]:
    """Checks that each node of ours has a record, and is what its record says."""
    for node in facts.nodes:
        expected, record = _expected_role(node), record_of(node)
        actual = None if record is None else record.role
        if actual is not expected and (expected is not None or actual in _RESERVED):
            says = "carries no record" if actual is None else f"is recorded as {actual.value}"
            hint = "its operator cannot do that" if expected is None else f"its operator makes it {expected.value}"
            yield node, says, f"{hint}; GraphBuilder writes the record of every node that passes insert"
        if record is not None:
            yield from _wrong_record(facts, node, record)


def _expected_role(node: fx.Node) -> Role | None:
    """The role that a node must have because of what it computes; `None` if that leaves it open."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    source_role = role_of(source) if isinstance(source, fx.Node) else None
    if node.op == "placeholder":
        actual = role_of(node)
        # Inputs have no operator: their record is all there is.
        return actual if actual in INPUTS else None
    named = _ROLE_OF_NAME.get(_qualified_name(node.target))
    if named is not None:
        return named
    if source_role is not None and node.target in (getitem, WAIT):
        return (_ITEM_OF if node.target is getitem else _WAIT_OF).get(source_role)
    if any(isinstance(a, str) and a.startswith(ALIAS_PREFIX) for a in node.args) or role_of(node) in _RESERVED:
        kind = KINDS.get(node.target)
        return None if kind is None else _ROLE_OF_KIND[kind]
    return None


def _wrong_record(facts: Facts, node: fx.Node, record: Record) -> Iterator[Finding]:
    if node.op != "placeholder" and record.phase is not facts.step.phase:
        what = f"is recorded as {record.phase.value} in the {facts.step.phase.value} graph"
        yield node, what, "a record's phase is that of the graph it was inserted into"
    if not record.parameters or len(record.parameters) != len(record.specs):
        what = f"is recorded for {len(record.parameters)} parameters with {len(record.specs)} specs"
        yield node, what, "a record names at least one parameter, and has one spec for each"
    if node.target in KINDS:
        yield from _wrong_names(node, record)


def _wrong_names(node: fx.Node, record: Record) -> Iterator[Finding]:
    """A collective whose record names other parameters than its messages' records."""
    sent = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
    records = [record_of(message) for message in sent if isinstance(message, fx.Node)]
    carried = {claim for each in records if each is not None for claim in each.claims}
    if None in records or carried == set(record.claims):
        return
    named = ", ".join(sorted({f"{name} of {unit}" for unit, name in carried ^ set(record.claims)}))
    what = f"its record and those of its messages differ in {named}"
    yield node, what, "a collective names the parameters of all of its messages, whichever units they are of"


def nothing_rank_specific(facts: Facts) -> Iterator[Finding]:
    """Checks the arguments of our nodes, so that every rank compiles the same text."""
    for node, record in facts.ours:
        if record.role not in INPUTS:
            yield from _rank_specific(node, record)
            yield from _wrong_bounds(node, record)


def _rank_specific(node: fx.Node, record: Record) -> Iterator[Finding]:
    if node.op == "get_attr":
        yield node, "reads a constant of this process", "compute it in the graph, or pass it in"
    for value in tree_leaves((node.args, node.kwargs)):
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                yield node, f"uses the constant %{value}", "compute it in the graph, or pass it in"
        elif isinstance(value, torch.device):
            if value.index is not None:
                yield node, f"names {value}", "take the device from an input, as aten.new_zeros does"
        elif not isinstance(value, _PORTABLE):
            kind = type(value).__name__
            yield node, f"holds a {kind}", "only nodes, numbers, strings and dtypes are alike on all ranks"
    if node.target in KINDS and not str(node.args[-1]).startswith(ALIAS_PREFIX):
        hint = f"use an alias such as {record.specs[0].group!r}, which each rank resolves to its own group"
        yield node, f"names the group {node.args[-1]!r}", hint


def _wrong_bounds(node: fx.Node, record: Record) -> Iterator[Finding]:
    """A slice of a flat parameter whose bounds are not those of the slots in its record."""
    source = node.args[0] if node.target is torch.ops.aten.slice.Tensor else None
    if not isinstance(source, fx.Node) or role_of(source) is not Role.FLAT:
        return
    wanted = (min(s.offset for s in record.specs), max(s.offset + s.extent for s in record.specs))
    first = record.specs[0]
    alone = (first.offset, first.offset + first.shard_numel)  # read in place by the only rank, padding left out
    allowed = (wanted, alone) if first.size == 1 and len(record.specs) == 1 else (wanted,)
    if tuple(node.args[2:4]) not in allowed:
        hint = f"[{wanted[0]}, {wanted[1]}) on every rank: the slots of {', '.join(record.parameters)}"
        yield node, f"takes [{node.args[2]}, {node.args[3]}) of the flat parameter", hint


@functools.cache
def _qualified_name(operator: Any) -> str:
    schema = getattr(operator, "_schema", None)
    return "" if schema is None else schema.name
