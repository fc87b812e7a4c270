"""One kernel where neighbours would have one each, which takes longer for the host to start than to run.

Casts of neighbouring messages of a flat parameter, in one buffer that all of them lie in:

    slice(%flat, 0, 64), cast    ->    slice(%flat, 0, 192), cast, slice 0 to 64
    slice(%flat, 64, 192), cast                                    slice 64 to 192

Copies of parameters out of a message that several units share, if the units have the same layout. They are made before
a unit needs them, and the message is free when the first unit has read its own:

    %message, of two units    ->  %copy [2, 8, 32]  ->  %w0 [16, 16], %w1 [16, 16]
    [8 ranks, (%w0 %b0 %w1 %b1)]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from fsdp_compile.cost.fusion import WRITTEN
from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role, StepGraph
from fsdp_compile.ir.queries import first_of
from fsdp_compile.layout.messages import cast, narrow, view
from fsdp_compile.passes.bucketing.messages import Message, ParamCollective, joint_record

aten = torch.ops.aten


def cast_together(b: GraphBuilder, runs: Iterable[Message]) -> Mapping[Message, fx.Node]:
    """Records the casts that several runs of neighbours share; returns the message of each such run."""
    messages: dict[Message, fx.Node] = {}
    for stretch in _stretches(list(filter(_is_cast, runs))):
        if len(stretch) == 1:
            continue
        flat, begin, end = stretch[0].flat, stretch[0].begin, _end(stretch[-1])
        b.record = joint_record([single for run in stretch for single in run.singles], Role.SHARD)
        whole = cast(b, narrow(b, flat, 0, begin, end), stretch[0].singles[0].spec.param_dtype)
        whole.meta[WRITTEN] = True  # or each message would be cast by itself
        for run in stretch:
            b.record = run.record(Role.SHARD)
            messages[run] = narrow(b, whole, 0, run.begin - begin, _end(run) - begin)
    return messages


def _is_cast(run: Message) -> bool:
    single = run.singles[0]
    spec = single.spec
    # What comes from the host is copied message by message, and 8-bit messages are not casts.
    plain = not (single.is_post_forward or spec.gather_format or spec.compute)
    return plain and spec.param_dtype != single.flat.meta["val"].dtype


def _stretches(runs: Sequence[Message]) -> list[list[Message]]:
    """Runs that follow each other in one flat parameter."""
    flats = list(dict.fromkeys(run.flat for run in runs))
    stretches: list[list[Message]] = []
    for run in sorted(runs, key=lambda run: (flats.index(run.flat), run.begin)):
        before = stretches[-1][-1] if stretches else None
        if before is not None and before.flat is run.flat and _end(before) == run.begin:
            stretches[-1].append(run)
        else:
            stretches.append([run])
    return stretches


def _end(run: Message) -> int:
    return run.begin + run.span


def copy_together(
    step: StepGraph, piece: Message, message: fx.Node, order: dict[fx.Node, int]
) -> dict[ParamCollective, fx.Node]:
    """Records the copies of parameters that units of a piece have alike.

    Returns:
        For each parameter that is in a copy, its part of it, `[numel]`.
    """
    parts: dict[ParamCollective, fx.Node] = {}
    for units in _alike(piece):
        begin, stride, count = piece.starts[units[0][0]], sum(single.spec.extent for single in units[0]), len(units)
        for same in zip(*units, strict=True):
            spec, offset = same[0].spec, piece.starts[same[0]] - begin
            b = GraphBuilder(step.graph, joint_record(same, Role.COPY_OUT), same[0].start)
            with step.graph.inserting_before(first_of([single.end for single in same], order)):
                rows = narrow(b, view(b, message, [spec.size, piece.span]), 1, begin, begin + count * stride)
                by_unit = b.call(aten.view.default, rows, [spec.size, count, stride])
                part = narrow(b, by_unit, 2, offset, offset + spec.shard_numel)
                in_order = b.call(aten.permute.default, part, [1, 0, 2])
                copy = b.call(aten.clone.default, in_order, memory_format=torch.contiguous_format)
                copy.meta[WRITTEN] = True  # or each reader would copy its part by itself
                numel = spec.size * spec.shard_numel
                whole = b.call(aten.view.default, copy, [count * numel])
            for index, single in enumerate(same):
                b = GraphBuilder(step.graph, joint_record([single], Role.COPY_OUT), single.start)
                with step.graph.inserting_before(single.end):
                    parts[single] = narrow(b, whole, 0, index * numel, (index + 1) * numel)
    return parts


def _alike(piece: Message) -> Iterator[list[tuple[ParamCollective, ...]]]:
    """Neighbouring units with parameters of the same shapes in the same order, whose ranks' parts are rows of them."""
    units = (tuple(singles) for _, singles in itertools.groupby(piece.singles, lambda single: single.flat))
    for _, found in itertools.groupby(
        units, lambda unit: [(s.spec.shape, s.spec.dim, s.spec.order, s.spec.extent, s.spec.shard_numel) for s in unit]
    ):
        alike = list(found)
        specs = [single.spec for single in alike[0]]
        if len(alike) > 1 and all(
            s.dim == 0 and s.size > 1 and not s.order and s.padded_shape == s.shape for s in specs
        ):
            yield alike
