"""Correct graphs of units that share collectives, each broken by one edit, and the rule that has to notice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import fx

from fsdp_compile.ir.graph import KEY, Phase, Role, StepGraph, require, role_of
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.verify.facts import Limits
from tests.verify.breaks import breaks

aten = torch.ops.aten
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
FIRST, SECOND = "blocks.0", "blocks.1"
"""Units that share collectives with `blocks.2`."""
LIMITS = Limits(prefetch=1, joined_bytes=1_000_000)
SMALLER = Limits(prefetch=1, joined_bytes=300_000)
_joined = functools.partial(breaks, bucket_mb=1, limits=LIMITS)


def _packed(step: StepGraph, role: Role) -> fx.Node:
    """What becomes the message of all small parameters, or gradients."""
    return next(n for n in step.nodes(role) if n.target is aten.cat.default and SECOND in require(n).units)


def _message(step: StepGraph, role: Role) -> fx.Node:
    """What has arrived of all units."""
    return next(n for n in step.nodes(role) if SECOND in require(n).units and FIRST in require(n).units)


def _full(step: StepGraph, parameter: str) -> fx.Node:
    return next(n for n in step.nodes(Role.FULL) if require(n).parameters == (parameter,))


def _of(nodes: list[fx.Node], unit: str) -> fx.Node:
    return next(n for n in nodes if require(n).units == (unit,))


@_joined("gathered-once", FORWARD, "element 0 is")
def another_units_slot_read(step: StepGraph) -> fx.Node:
    """The second unit reads the same parameter of the first one."""
    full = _full(step, "blocks.1.norm.bias")
    part = full.all_input_nodes[0]
    assert part.target is aten.slice.Tensor
    begin, end = part.args[2:4]
    part.args = (*part.args[:2], begin - (end - begin), begin)  # type: ignore[operator]
    return full


@_joined("gathered-once", FORWARD, "is not blocks.1.norm.bias")
def unit_left_out_of_the_message(step: StepGraph) -> fx.Node:
    """The first unit's parameters travel twice, in the second one's place, too."""
    packed = _packed(step, Role.SHARD)
    parts = list(packed.all_input_nodes)
    packed.args = ([_of(parts, FIRST) if require(part).units == (SECOND,) else part for part in parts],)
    return _full(step, "blocks.1.norm.bias")


def _respecified(step: StepGraph, change: Callable[[UnshardSpec], UnshardSpec]) -> None:
    """Changes what all records say of the second unit's parameters."""
    for node in step.graph.nodes:
        if role_of(node) is not None:
            record = require(node)
            specs = [change(s) if u == SECOND else s for (u, _), s in zip(record.claims, record.specs, strict=True)]
            node.meta[KEY] = dataclasses.replace(record, specs=tuple(specs))


@_joined("gathered-once", FORWARD, "'fsdp.shard.0'")
def units_of_two_groups_joined(step: StepGraph) -> fx.Node:
    _respecified(step, lambda spec: dataclasses.replace(spec, group="fsdp.shard.1"))
    return next(iter(step.nodes(Role.GATHER)))


@_joined("gathered-once", FORWARD, "as torch.float32")
def units_of_two_dtypes_joined(step: StepGraph) -> fx.Node:
    _respecified(step, lambda spec: dataclasses.replace(spec, param_dtype=torch.bfloat16))
    return next(iter(step.nodes(Role.GATHER)))


@_joined("reduced-once", BACKWARD, "'fsdp.shard.0'")
def gradients_of_units_of_two_groups_joined(step: StepGraph) -> fx.Node:
    _respecified(step, lambda spec: dataclasses.replace(spec, group="fsdp.shard.1"))
    return next(iter(step.nodes(Role.REDUCE)))


@_joined("reduced-once", BACKWARD, "where")
def another_units_gradient_taken(step: StepGraph) -> fx.Node:
    """Two units take each other's part of what was reduced together."""
    parts = [n for n in step.nodes(Role.SHARD_GRADIENT) if n.target is aten.slice.Tensor]
    first, second = _of(parts, FIRST), _of(parts, SECOND)
    first.args, second.args = second.args, first.args
    return next(iter(step.nodes(Role.REDUCE)))


@_joined("reduced-once", BACKWARD, "blocks")
def gradient_left_out_of_the_message(step: StepGraph) -> fx.Node:
    """The first unit's gradients take the places of the second one's."""
    packed = _packed(step, Role.GRADIENT)
    parts = list(packed.all_input_nodes)
    source = {name: part for part in parts for name in require(part.all_input_nodes[0]).parameters}
    names = [require(part.all_input_nodes[0]).parameters[0] for part in parts]
    packed.update_arg(0, [source[name.replace(SECOND, FIRST)] for name in names])
    return next(iter(step.nodes(Role.REDUCE)))


@_joined("gather-waited", BACKWARD, "stands before")
def reduction_started_before_the_last_units_gradients(step: StepGraph) -> fx.Node:
    packed = _packed(step, Role.GRADIENT)
    early = _of([part.all_input_nodes[0] for part in packed.all_input_nodes], SECOND)
    early.append(packed)
    return packed


@_joined("unsharded-bytes", FORWARD, "3 units that share it", limits=SMALLER)
def more_shared_than_allowed(step: StepGraph) -> fx.Node:
    return next(iter(step.nodes(Role.GATHER)))


@_joined("unsharded-bytes", BACKWARD, "3 units that share it", limits=SMALLER)
def more_gradients_shared_than_allowed(step: StepGraph) -> fx.Node:
    return next(iter(step.nodes(Role.REDUCE)))


@_joined("typed", FORWARD, "differ in blocks.1.down.bias of blocks")
def unit_forgotten_in_the_record(step: StepGraph) -> fx.Node:
    """The gather's record does not tell of the second unit."""
    (start,) = step.nodes(Role.GATHER)
    start.meta[KEY] = dataclasses.replace(require(start), owners=())
    return start
