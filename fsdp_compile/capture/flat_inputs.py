"""Finds the flat tensors of parameter groups among the inputs of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.ir.graph import Phase, Record, Role
from fsdp_compile.layout.spec import GradPlacement


def flat_inputs(inputs: Sequence[object]) -> dict[int, Record]:
    """Finds flat tensors, and the inputs that belong to them, among the inputs of Dynamo's graph."""
    groups = {i: group for i, value in enumerate(inputs) if (group := ParamGroup.of(value)) is not None}
    titles: dict[str, Any] = {}
    found: dict[int, Record] = {}
    extra: dict[int, Record] = {}
    for i, group in groups.items():
        title = group.title
        while titles.setdefault(title, group.unit) is not group.unit:
            title += "'"
        record = Record(
            Role.FLAT, title, tuple(p.name for p in group.params), tuple(p.spec for p in group.params), Phase.FORWARD
        )
        found[i] = record
        for param in group.params:
            if param.spec.offset in group.gathered:
                extra[id(group.gathered[param.spec.offset])] = dataclasses.replace(
                    record, role=Role.UNSHARDED_PARAM, parameters=(param.name,), specs=(param.spec,)
                )
        for role, placement in (
            (Role.UNREDUCED_GRAD, GradPlacement.UNREDUCED),
            (Role.PARTIAL_GRAD, GradPlacement.REDUCE_SCATTERED),
        ):
            if placement in group.pending.placements:
                extra[id(group.pending.leaf(placement))] = dataclasses.replace(record, role=Role.GRAD_ACCUMULATOR)
                extra[id(group.pending.blank(placement))] = dataclasses.replace(record, role=role)
    return found | {i: extra[id(value)] for i, value in enumerate(inputs) if id(value) in extra}
