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
from tests.verify.breaks import Break

aten = torch.ops.aten
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
FIRST, SECOND = "blocks.0", "blocks.1"
"""Units that share collectives with `blocks.2`."""
LIMITS = Limits(prefetch=1, joined_bytes=1_000_000)
SMALLER = Limits(prefetch=1, joined_bytes=300_000)


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


# gather-waited


def joined_message_waited_for_before_its_start(step: StepGraph) -> fx.Node:
    wait = _message(step, Role.GATHER_WAIT)
    (start,) = step.nodes(Role.GATHER)
    start.prepend(wait)
    return wait


# gathered-once


def another_units_slot_read(step: StepGraph) -> fx.Node:
    """The second unit reads the same parameter of the first one."""
    full = _full(step, "blocks.1.norm.bias")
    part = full.all_input_nodes[0]
    assert part.target is aten.slice.Tensor
    begin, end = part.args[2:4]
    part.args = (*part.args[:2], begin - (end - begin), begin)  # type: ignore[operator]
    return full


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


def units_of_two_groups_joined(step: StepGraph) -> fx.Node:
    _respecified(step, lambda spec: dataclasses.replace(spec, group="fsdp.shard.1"))
    return next(iter(step.nodes(Role.GATHER)))


def units_of_two_dtypes_joined(step: StepGraph) -> fx.Node:
    _respecified(step, lambda spec: dataclasses.replace(spec, param_dtype=torch.bfloat16))
    return next(iter(step.nodes(Role.GATHER)))


# reduced-once


def gradients_of_units_of_two_groups_joined(step: StepGraph) -> fx.Node:
    _respecified(step, lambda spec: dataclasses.replace(spec, group="fsdp.shard.1"))
    return next(iter(step.nodes(Role.REDUCE)))


def another_units_gradient_taken(step: StepGraph) -> fx.Node:
    """Two units take each other's part of what was reduced together."""
    parts = [n for n in step.nodes(Role.SHARD_GRADIENT) if n.target is aten.slice.Tensor]
    first, second = _of(parts, FIRST), _of(parts, SECOND)
    first.args, second.args = second.args, first.args
    return next(iter(step.nodes(Role.REDUCE)))


def gradient_left_out_of_the_message(step: StepGraph) -> fx.Node:
    """The first unit's gradients take the places of the second one's."""
    packed = _packed(step, Role.GRADIENT)
    parts = list(packed.all_input_nodes)
    source = {name: part for part in parts for name in require(part.all_input_nodes[0]).parameters}
    names = [require(part.all_input_nodes[0]).parameters[0] for part in parts]
    packed.update_arg(0, [source[name.replace(SECOND, FIRST)] for name in names])
    return next(iter(step.nodes(Role.REDUCE)))


def reduction_started_before_the_last_units_gradients(step: StepGraph) -> fx.Node:
    packed = _packed(step, Role.GRADIENT)
    early = _of([part.all_input_nodes[0] for part in packed.all_input_nodes], SECOND)
    early.append(packed)
    return packed


# no-use-after-reshard


def freed_before_the_last_copy(step: StepGraph) -> fx.Node:
    """After the first parameter's use; what all units have of the last one is not copied yet."""
    (marker,) = step.nodes(Role.RESHARD)
    used = next(iter(_full(step, "blocks.0.norm.weight").users))
    used.append(marker)
    later = _full(step, "blocks.1.down.bias")
    while role_of(later) is not Role.COPY_OUT or role_of(later.all_input_nodes[0]) is not Role.GATHER_WAIT:
        later = later.all_input_nodes[0]
    return later


# nothing-unsharded-saved


def one_units_part_of_the_message_saved(step: StepGraph) -> fx.Node:
    full = _full(step, "blocks.1.norm.bias")
    outputs = step.output.args[0]
    assert isinstance(outputs, list | tuple)
    step.output.args = ([*outputs, full],)
    step.output.meta["desc"] = [*step.output.meta["desc"], step.output.meta["desc"][-1]]
    return full


# unsharded-bytes


def kept_until_the_end(step: StepGraph) -> fx.Node:
    (marker,) = step.nodes(Role.RESHARD)
    step.output.prepend(marker)
    return marker


def more_shared_than_allowed(step: StepGraph) -> fx.Node:
    return next(iter(step.nodes(Role.GATHER)))


def more_gradients_shared_than_allowed(step: StepGraph) -> fx.Node:
    return next(iter(step.nodes(Role.REDUCE)))


# typed


def unit_forgotten_in_the_record(step: StepGraph) -> fx.Node:
    """The gather's record does not tell of the second unit."""
    (start,) = step.nodes(Role.GATHER)
    start.meta[KEY] = dataclasses.replace(require(start), owners=())
    return start


_Joined = functools.partial(Break, bucket_mb=1, limits=LIMITS)
BREAKS = (
    _Joined("gather-waited", joined_message_waited_for_before_its_start, FORWARD, "stands before"),
    _Joined("gather-waited", reduction_started_before_the_last_units_gradients, BACKWARD, "stands before"),
    _Joined("gathered-once", another_units_slot_read, FORWARD, "element 0 is"),
    _Joined("gathered-once", unit_left_out_of_the_message, FORWARD, "is not blocks.1.norm.bias"),
    _Joined("gathered-once", units_of_two_groups_joined, FORWARD, "'fsdp.shard.0'"),
    _Joined("gathered-once", units_of_two_dtypes_joined, FORWARD, "as torch.float32"),
    _Joined("reduced-once", gradients_of_units_of_two_groups_joined, BACKWARD, "'fsdp.shard.0'"),
    _Joined("reduced-once", another_units_gradient_taken, BACKWARD, "where"),
    _Joined("reduced-once", gradient_left_out_of_the_message, BACKWARD, "blocks"),
    _Joined("no-use-after-reshard", freed_before_the_last_copy, FORWARD, "freed it"),
    _Joined("nothing-unsharded-saved", one_units_part_of_the_message_saved, FORWARD, "256 bytes"),
    _Joined("unsharded-bytes", kept_until_the_end, FORWARD, "which needs none"),
    _Joined("unsharded-bytes", more_shared_than_allowed, FORWARD, "3 units that share it", limits=SMALLER),
    _Joined("unsharded-bytes", more_gradients_shared_than_allowed, BACKWARD, "3 units that share it", limits=SMALLER),
    _Joined("typed", unit_forgotten_in_the_record, FORWARD, "differ in blocks.1.down.bias of blocks"),
)
