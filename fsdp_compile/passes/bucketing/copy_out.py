"""Copies parameters out of a message that several units share: equal layouts are copied at once.

    %message, of two units    ->  %copy [2, 8, 32]  ->  %w0 [16, 16], %w1 [16, 16]
    [8 ranks, (%w0 %b0 %w1 %b1)]

A copy for each parameter would take longer for the host to start than to run: such units are tiny. The copies are made
before a unit needs them, and the message is free when the first unit has read its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import fx

from fsdp_compile.cost.fusion import WRITTEN
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role, StepGraph
from fsdp_compile.ir.queries import first_of
from fsdp_compile.layout.messages import narrow, view
from fsdp_compile.passes.bucketing.messages import Message, ParamCollective, joint_record

aten = torch.ops.aten


def copy_together(
    step: StepGraph, piece: Message, message: fx.Node, order: dict[fx.Node, int]
) -> dict[ParamCollective, fx.Node]:
    """Records the copies of parameters that units of a piece have alike.

    Returns:
        For each parameter that is in a copy, its part of it, `[numel]`.
    """
    parts: dict[ParamCollective, fx.Node] = {}
    for units in _alike(piece):
        if len(units) > 1 and all(map(_lies_in_rows, units[0])):
            begin, stride = piece.starts[units[0][0]], sum(single.spec.extent for single in units[0])
            for same in zip(*units, strict=True):
                offset = piece.starts[same[0]] - begin
                copy = _copy(step, message, same, piece.span, (begin, stride, offset), order)
                parts |= _parts(step, copy, same)
    return parts


def _alike(piece: Message) -> Iterator[list[tuple[ParamCollective, ...]]]:
    """Neighbours among the units of a message that have parameters of the same shapes in the same order."""
    units = (tuple(singles) for _, singles in itertools.groupby(piece.singles, lambda single: single.flat))
    for _, same in itertools.groupby(units, _layout):
        yield list(same)


def _layout(unit: Sequence[ParamCollective]) -> Hashable:
    return tuple((s.spec.shape, s.spec.dim, s.spec.order, s.spec.extent, s.spec.shard_numel) for s in unit)


def _lies_in_rows(single: ParamCollective) -> bool:
    """Whether the ranks' parts of a parameter, one after the other, are the parameter."""
    spec = single.spec
    return spec.dim == 0 and spec.size > 1 and not spec.order and spec.padded_shape == spec.shape


def _copy(
    step: StepGraph,
    message: fx.Node,
    same: Sequence[ParamCollective],
    span: int,
    place: tuple[int, int, int],
    order: dict[fx.Node, int],
) -> fx.Node:
    """`[units * numel]`: one parameter of each unit, out of `[size, span]`.

    `place` is where in a rank's span the first unit begins, the elements of a unit, and where in them the parameter
    begins.
    """
    spec, units = same[0].spec, len(same)
    begin, stride, offset = place
    first = first_of([single.end for single in same], order)
    b = GraphBuilder(step.graph, joint_record(same, Role.COPY_OUT), same[0].start)
    with step.graph.inserting_before(first):
        rows = narrow(b, view(b, message, [spec.size, span]), 1, begin, begin + units * stride)
        by_unit = b.call(aten.view.default, rows, [spec.size, units, stride])
        part = narrow(b, by_unit, 2, offset, offset + spec.shard_numel)
        in_order = b.call(aten.permute.default, part, [1, 0, 2])
        copy = b.call(aten.clone.default, in_order, memory_format=torch.contiguous_format)
        copy.meta[WRITTEN] = True  # or each reader would copy its part by itself
        return b.call(aten.view.default, copy, [units * spec.size * spec.shard_numel])


def _parts(step: StepGraph, copy: fx.Node, same: Sequence[ParamCollective]) -> dict[ParamCollective, fx.Node]:
    numel = same[0].spec.size * same[0].spec.shard_numel
    parts = {}
    for index, single in enumerate(same):
        b = GraphBuilder(step.graph, joint_record([single], Role.COPY_OUT), single.start)
        with step.graph.inserting_before(single.end):
            parts[single] = b.call(aten.slice.Tensor, copy, 0, index * numel, (index + 1) * numel)
    return parts
