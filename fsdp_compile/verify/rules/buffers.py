"""buffers-aligned: slots of a flat parameter lie apart, and every message starts and ends on an aligned address."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import fx

from fsdp_compile.ir.graph import Role, role_of
from fsdp_compile.layout.flat_layout import ReduceLayout
from fsdp_compile.verify.collective import Collective, Kind
from fsdp_compile.verify.facts import Facts, dtype_of, shape_of
from fsdp_compile.verify.report import Complaint
from fsdp_compile.verify.slots import Slot, slots_of
from fsdp_compile.verify.trace_elements import origin

RULE = "buffers-aligned"
ALIGNMENT_BYTES = 128
"""Written here again on purpose, so that a wrong number in the layout is noticed."""


def buffers_aligned(facts: Facts) -> list[Complaint]:
    """Checks the slots of each flat parameter, and what each collective sends."""
    complaints = [c for flat in facts.of_role(Role.FLAT) for c in _wrong_slots(flat)]
    for collective in facts.collectives:
        if collective.kind is Kind.GATHER or facts.limits.reduce_layout is ReduceLayout.ALIGNED:
            complaints.extend(_wrong_messages(collective))
    return complaints


def _wrong_slots(flat: fx.Node) -> Iterator[Complaint]:
    stored = dtype_of(flat)
    end, before = 0, "the start"
    for slot in sorted(slots_of(flat), key=lambda s: s.spec.offset):
        spec = slot.spec
        if spec.offset < end:
            yield Complaint(
                RULE,
                flat,
                f"slot {slot.name} starts at {spec.offset}, inside of {before}, which ends at {end}",
                "slots of one flat parameter are disjoint",
            )
        if spec.extent < spec.shard_numel:
            yield Complaint(
                RULE,
                flat,
                f"slot {slot.name} has {spec.extent} elements for a shard of {spec.shard_numel}",
                "a slot holds its shard, and padding up to an aligned end",
            )
        yield from _misaligned_slot(flat, slot, stored)
        end, before = spec.offset + spec.extent, slot.name
    if end > prod(shape_of(flat)):
        yield Complaint(
            RULE,
            flat,
            f"slot {before} ends at {end}, beyond the flat parameter of {prod(shape_of(flat))} elements",
            "the flat parameter's size is the end of its last slot",
        )


def _misaligned_slot(flat: fx.Node, slot: Slot, stored: torch.dtype | None) -> Iterator[Complaint]:
    for dtype in dict.fromkeys((stored, slot.spec.wire_dtype)):
        if dtype is not None and not _is_aligned(dtype, slot.spec.offset, slot.spec.extent):
            yield Complaint(
                RULE,
                flat,
                f"slot {slot.name} is [{slot.spec.offset}, {slot.spec.offset + slot.spec.extent}), "
                f"not aligned as {dtype}",
                f"offset and extent are multiples of {ALIGNMENT_BYTES} bytes, stored and sent",
            )


def _wrong_messages(collective: Collective) -> Iterator[Complaint]:
    """Every rank's slice of every message; a slice that is gathered also lies in a flat parameter."""
    for message in collective.sent:
        dtype, numel = dtype_of(message), prod(shape_of(message))
        slices = collective.size if collective.kind is Kind.REDUCE else 1
        if dtype is None or numel % slices or not _is_aligned(dtype, numel // slices):
            yield Complaint(
                RULE,
                collective.start,
                f"sends %{message}, {slices} slices of {numel / slices:g} elements of {dtype}",
                f"each rank's slice is a multiple of {ALIGNMENT_BYTES} bytes",
            )
        elif collective.kind is Kind.GATHER and numel:
            first = origin(message, 0, 0)
            stored = dtype_of(first.node) if first.node is not None and role_of(first.node) is Role.FLAT else None
            if stored is not None and not _is_aligned(stored, first.index):
                yield Complaint(
                    RULE,
                    collective.start,
                    f"sends %{message}, which starts at element {first.index} of %{first.node}",
                    f"messages start at a multiple of {ALIGNMENT_BYTES} bytes",
                )


def _is_aligned(dtype: torch.dtype, *elements: int) -> bool:
    return all(n * dtype.itemsize % ALIGNMENT_BYTES == 0 for n in elements)
