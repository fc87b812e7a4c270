"""Where messages lie, and how they reach the device.

buffers-aligned: slots of a flat parameter lie apart, and every message starts and ends on an aligned address.

host-copies: shards on the host reach the device in one copy before the gather, and gradients come back in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import fx

from fsdp_compile.ir.graph import Role, require, role_of
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.ops.host_copy import START_COPY, WAIT_COPY
from fsdp_compile.verify.facts import Collective, Facts, Kind, dtype_of, shape_of
from fsdp_compile.verify.report import Finding
from fsdp_compile.verify.trace_elements import origin, slots_of

ALIGNMENT_BYTES = 128
"""Written here again on purpose, so that a wrong number in the layout is noticed."""


def buffers_aligned(facts: Facts) -> Iterator[Finding]:
    """Checks the slots of each flat parameter, and what each collective sends."""
    for flat in facts.of_role(Role.FLAT):
        yield from _wrong_slots(flat)
    for collective in facts.collectives:
        if collective.kind is Kind.GATHER or facts.limits.reduce_layout is ReduceLayout.ALIGNED:
            yield from _wrong_messages(collective)


def _wrong_slots(flat: fx.Node) -> Iterator[Finding]:
    stored = dtype_of(flat)
    end, before = 0, "the start"
    for slot in sorted(slots_of(flat), key=lambda s: s.spec.offset):
        spec = slot.spec
        if spec.offset < end:
            what = f"slot {slot.name} starts at {spec.offset}, inside of {before}, which ends at {end}"
            yield flat, what, "slots of one flat parameter are disjoint"
        if spec.extent < spec.shard_numel:
            what = f"slot {slot.name} has {spec.extent} elements for a shard of {spec.shard_numel}"
            yield flat, what, "a slot holds its shard, and padding up to an aligned end"
        for dtype in dict.fromkeys((stored, spec.wire_dtype)):
            if dtype is not None and not _is_aligned(dtype, spec.offset, spec.extent):
                what = f"slot {slot.name} is [{spec.offset}, {spec.offset + spec.extent}), not aligned as {dtype}"
                yield flat, what, f"offset and extent are multiples of {ALIGNMENT_BYTES} bytes, stored and sent"
        end, before = spec.offset + spec.extent, slot.name
    if end > prod(shape_of(flat)):
        what = f"slot {before} ends at {end}, beyond the flat parameter of {prod(shape_of(flat))} elements"
        yield flat, what, "the flat parameter's size is the end of its last slot"


def _wrong_messages(collective: Collective) -> Iterator[Finding]:
    """Every rank's slice of every message; a slice that is gathered also lies in a flat parameter."""
    for message in collective.sent:
        dtype, numel = dtype_of(message), prod(shape_of(message))
        slices = collective.size if collective.kind is Kind.REDUCE else 1
        if dtype is None or numel % slices or not _is_aligned(dtype, numel // slices):
            what = f"sends %{message}, {slices} slices of {numel / slices:g} elements of {dtype}"
            yield collective.start, what, f"each rank's slice is a multiple of {ALIGNMENT_BYTES} bytes"
        elif collective.kind is Kind.GATHER and numel:
            first = origin(message, 0, 0)
            stored = dtype_of(first.node) if first.node is not None and role_of(first.node) is Role.FLAT else None
            if stored is not None and not _is_aligned(stored, first.index):
                what = f"sends %{message}, which starts at element {first.index} of %{first.node}"
                yield collective.start, what, f"messages start at a multiple of {ALIGNMENT_BYTES} bytes"


def _is_aligned(dtype: torch.dtype, *elements: int) -> bool:
    return all(n * dtype.itemsize % ALIGNMENT_BYTES == 0 for n in elements)


_WAIT_OF = {Role.OFFLOAD_IN: Role.OFFLOAD_IN_WAIT, Role.OFFLOAD_OUT: Role.OFFLOAD_OUT_WAIT}
_OPERATOR = {**dict.fromkeys(_WAIT_OF, START_COPY), **dict.fromkeys(_WAIT_OF.values(), WAIT_COPY)}


def host_copies(facts: Facts) -> list[Finding]:
    """Checks both directions, and that no node reads a copy before it is complete."""
    return [*_inward(facts), *_outward(facts), *_wrong_operators(facts), *_wrong_copies(facts)]


def _inward(facts: Facts) -> Iterator[Finding]:
    sent = [m for gather in facts.of_kind(Kind.GATHER) for m in gather.sent]
    alone = [node for node in facts.of_role(Role.FULL) if require(node).specs[0].size == 1]
    for node in (*sent, *alone):
        if role_of(node) is None:
            continue  # the rule `typed` says what is wrong
        record, ways = require(node), _ways(node)
        compute, names = record.specs[0].compute, ", ".join(record.parameters)
        if any(len(way) != bool(compute) for way in ways) or len(ways) > 1:
            counts = {len(way) for way in ways}
            copies = " or ".join(map(str, sorted(counts))) if len(counts) > 1 else str(len(frozenset.union(*ways)))
            hint = f"{names}: one copy to {compute!r}" if compute else f"{names}: none, its shard is on the device"
            yield node, f"reaches its readers after {copies} copies from the host", hint


def _ways(node: fx.Node) -> frozenset[frozenset[fx.Node]]:
    """The copies from the host between the flat parameter and `node`; a quantized message has two, by its scales."""
    role = role_of(node)
    if role is Role.FLAT:
        return frozenset([frozenset()])
    # A parameter that is still unsharded is on the device: no path leads to it from a flat parameter.
    if role not in (Role.SHARD, Role.OFFLOAD_IN, Role.OFFLOAD_IN_WAIT, Role.COPY_OUT, Role.FULL):
        return frozenset()
    own = frozenset([node] if role is Role.OFFLOAD_IN else [])
    return frozenset(way | own for source in node.all_input_nodes for way in _ways(source))


def _outward(facts: Facts) -> Iterator[Finding]:
    for gradient in facts.of_role(Role.FLAT_GRADIENT):
        copied = role_of(gradient.all_input_nodes[0]) is Role.OFFLOAD_OUT_WAIT
        if copied != bool(require(gradient).specs[0].compute):
            what = "is not copied to the host" if not copied else "is copied to the host"
            yield gradient, what, "a flat gradient is where its flat parameter is"
    for wait in facts.of_role(Role.OFFLOAD_OUT_WAIT):
        for user in wait.users:
            if role_of(user) is not Role.FLAT_GRADIENT:
                what = f"reads %{wait}, which may still be on its way to the host"
                yield user, what, "read what was copied: the host waits when the graph has run"


def _wrong_operators(facts: Facts) -> Iterator[Finding]:
    """Copies that are recorded as something else, and the other way round."""
    for node in facts.nodes:
        role = role_of(node)
        if (node.target in (START_COPY, WAIT_COPY) or role in _OPERATOR) and _OPERATOR.get(role) is not node.target:  # type: ignore[arg-type]
            recorded = "carries no record" if role is None else f"is recorded as {role.value}"
            hint = "start_copy and wait_copy alone copy between host and device, overlapping what is computed"
            yield node, f"{recorded} and does something else", hint


def _wrong_copies(facts: Facts) -> Iterator[Finding]:
    """Copies to the wrong place, and copies that are read or overwritten before they are waited for."""
    for node in facts.of_role(*_WAIT_OF):
        role = require(node).role
        if node.target is not START_COPY:
            continue
        wanted = require(node).specs[0].compute if role is Role.OFFLOAD_IN else "cpu"
        if node.args[1] != wanted:
            yield node, f"copies to {node.args[1]!r}", f"{role.value} copies to {wanted!r}"
        waits = [user for user in node.users if user.target is WAIT_COPY and user.args[0] is node]
        if len(waits) != 1:
            yield node, f"is waited for {len(waits)} times", "one fsdp_compile.wait_copy, which all readers use"
        for user in node.users:
            if user not in waits:
                yield user, f"reads %{node} while it may still be on its way", "use the result of its wait_copy"
        for wait in waits:
            if role_of(wait) is not _WAIT_OF[role]:
                yield wait, f"waits for {role.value}", f"it is {_WAIT_OF[role].value}"
            if role is Role.OFFLOAD_OUT and wait.args[1:] != (node.args[0],):
                what = f"lets go of %{node.args[0]} while it may still be copied"
                yield wait, what, "a wait takes what was copied as well, so that its memory is not reused before"
