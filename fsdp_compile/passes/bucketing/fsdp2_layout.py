"""Writes the reduction of a bucket as FSDP2 does: one message, parameter after parameter, without alignment.

    %w_rows, %b_rows  ->  cat of both without padding, reduce_scatter, wait, and a slice for each parameter

gloo adds the contributions of three ranks or more in an order that depends on the place in the message, so the same
bits need the same message.
"""

from __future__ import annotations

import itertools

import torch
from torch import fx

from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role, StepGraph, require
from fsdp_compile.ir.queries import InputsByFlat, last_of
from fsdp_compile.layout.messages import narrow, view
from fsdp_compile.passes.bucketing.messages import Bucket, joint_record
from fsdp_compile.passes.emit import add_partial, reduce_one

aten = torch.ops.aten
Reduced = tuple[fx.Node, int, fx.Node]
"""A flat parameter, the first element of a part of it, and the averaged gradient from there on."""


def write_packed_reduction(
    step: StepGraph, bucket: Bucket, order: dict[fx.Node, int], partials: InputsByFlat
) -> list[Reduced]:
    """Writes all stages at the place where the last gradient is ready; returns one entry per parameter."""
    # In the order of registration, which is that of each flat parameter's record.
    flats = list(dict.fromkeys(single.flat for single in bucket.singles))
    offsets = {flat: [spec.offset for spec in require(flat).specs] for flat in flats}
    singles = sorted(bucket.singles, key=lambda s: (flats.index(s.flat), offsets[s.flat].index(s.spec.offset)))
    final = last_of([s.start for s in singles], order)
    b = GraphBuilder(step.graph, joint_record(singles, Role.GRADIENT), final)

    def parts_of(message: fx.Node) -> list[fx.Node]:
        """This rank's part of each parameter."""
        ends = list(itertools.accumulate(single.spec.shard_numel for single in singles))
        return [narrow(b, message, 0, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def with_partials(message: fx.Node) -> fx.Node:
        """The reduce-scattered gradients, with what earlier backward passes have accumulated."""
        held = [partials.of(single.flat) for single in singles]
        if not any(held):
            return message
        with b.as_role(Role.ADD_PARTIAL):
            pieces = zip(singles, held, parts_of(message), strict=True)
            return _joined(b, [add_partial(b, partial, s.spec.offset, part) for s, partial, part in pieces], dim=0)

    with step.graph.inserting_before(final):
        # `[size, shard_numel]` of each: the rows for each rank, without the padding of its slot.
        specs = [(s.sent, s.spec) for s in singles]
        rows = [narrow(b, view(b, sent, [spec.size, spec.extent]), 1, 0, spec.shard_numel) for sent, spec in specs]
        message = view(b, _joined(b, rows, dim=1), [sum(spec.size * spec.shard_numel for _, spec in specs)])
        message = reduce_one(b, message, bucket.spec, with_partials)
        with b.as_role(Role.SHARD_GRADIENT):
            return [(s.flat, s.spec.offset, part) for s, part in zip(singles, parts_of(message), strict=True)]


def _joined(b: GraphBuilder, parts: list[fx.Node], *, dim: int) -> fx.Node:
    return parts[0] if len(parts) == 1 else b.call(aten.cat.default, parts, dim)
