"""Writes the reduction of a bucket as FSDP2 does: one message, parameter after parameter, without alignment.

    %w_rows, %b_rows  ->  cat of both without padding, reduce_scatter, wait, and a slice for each parameter

gloo adds the contributions of three ranks or more in an order that depends on the place in the message, so the same
bits need the same message.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import fx

from fsdp_compile._torch.distributed import collectives
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role, StepGraph, require
from fsdp_compile.ir.queries import InputsByFlat, last_of
from fsdp_compile.layout.messages import narrow, view
from fsdp_compile.passes.bucketing.messages import Bucket, ParamCollective, joint_record
from fsdp_compile.passes.emit import add_partial, scale_after, stages

aten = torch.ops.aten
Reduced = tuple[fx.Node, int, fx.Node]
"""A flat parameter, the first element of a part of it, and the averaged gradient from there on."""


def write_packed_reduction(
    step: StepGraph, bucket: Bucket, order: dict[fx.Node, int], partials: InputsByFlat
) -> list[Reduced]:
    """Writes all stages at the place where the last gradient is ready; returns one entry per parameter."""
    singles = _as_registered(bucket.singles)
    final = last_of([s.start for s in singles], order)
    b = GraphBuilder(step.graph, joint_record(singles, Role.GRADIENT), final)
    with step.graph.inserting_before(final):
        message = _joined(b, [_rows(b, single) for single in singles], dim=1)
        message = view(b, message, [message_numel(singles)])
        for stage in stages(bucket.spec):
            if stage.start is Role.REPLICATE:
                message = _with_partials(b, singles, message, partials)
            with b.as_role(stage.start):
                message = b.call(stage.single, message, *stage.arguments(bucket.spec))
            with b.as_role(stage.wait):
                message = b.call(collectives.wait_tensor.default, message)
        message = scale_after(b, message, bucket.spec)
        with b.as_role(Role.SHARD_GRADIENT):
            return [(s.flat, s.spec.offset, part) for s, part in zip(singles, _parts(b, singles, message), strict=True)]


def message_numel(singles: Sequence[ParamCollective]) -> int:
    """Elements of the message of all ranks."""
    return singles[0].spec.size * sum(single.spec.shard_numel for single in singles)


def _as_registered(singles: Sequence[ParamCollective]) -> list[ParamCollective]:
    """Parameters in the order of registration, which is that of each flat parameter's record."""
    flats = list(dict.fromkeys(single.flat for single in singles))
    offsets = {flat: [spec.offset for spec in require(flat).specs] for flat in flats}
    return sorted(singles, key=lambda s: (flats.index(s.flat), offsets[s.flat].index(s.spec.offset)))


def _rows(b: GraphBuilder, single: ParamCollective) -> fx.Node:
    """`[size, shard_numel]`: a gradient's rows for each rank, without the padding of its slot."""
    spec = single.spec
    return narrow(b, view(b, single.sent, [spec.size, spec.extent]), 1, 0, spec.shard_numel)


def _joined(b: GraphBuilder, parts: Sequence[fx.Node], *, dim: int) -> fx.Node:
    return parts[0] if len(parts) == 1 else b.call(aten.cat.default, list(parts), dim)


def _parts(b: GraphBuilder, singles: Sequence[ParamCollective], message: fx.Node) -> list[fx.Node]:
    """This rank's part of each parameter."""
    ends = list(itertools.accumulate(single.spec.shard_numel for single in singles))
    return [narrow(b, message, 0, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _with_partials(
    b: GraphBuilder, singles: Sequence[ParamCollective], message: fx.Node, partials: InputsByFlat
) -> fx.Node:
    """The reduce-scattered gradient of each parameter, with what earlier backward passes have accumulated."""
    held = [partials.of(single.flat) for single in singles]
    if not any(held):
        return message
    with b.as_role(Role.ADD_PARTIAL):
        parts = [
            part if partial is None else add_partial(b, partial, single.spec.offset, part)
            for single, partial, part in zip(singles, held, _parts(b, singles, message), strict=True)
        ]
        return _joined(b, parts, dim=0)
