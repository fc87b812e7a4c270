"""`no_sync`, and what becomes of gradients that are accumulated before they are fully reduced."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.ops.unshard import sum_over_replicas, sum_over_shards
from fsdp_compile.runtime import gradients, module_state, read_order, update_in_backward
from fsdp_compile.runtime.group_state import CommSettings
from fsdp_compile.runtime.read_order import Done
from fsdp_compile.runtime.units import FSDPParamGroup, FSDPUnit
from fsdp_compile.runtime.unshard_args import grad_placement_of, refresh_unshard_args

DDP_FLAG = "require_backward_grad_sync"
"""Attribute by which scripts switch off the reductions of DDP without its `no_sync`."""


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without communication: forwards in the block leave theirs unsharded on each rank.

    The next backward outside of it adds them to its own gradients and reduces the sum once. Whether a backward reduces
    is decided when its forward runs. Accumulated gradients take the memory of a full gradient, in the reduce dtype;
    they are not in `.grad`, and `zero_grad()` does not drop them.

    Args:
        model: The model, compiled or not. It may be sharded by its first call inside of the block.

    Raises:
        ConfigError: If `model` is no module.
    """
    module = module_state.unwrap(model)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{type(module).__name__} is not a torch.nn.Module",
            where="no_sync(model)",
            instead="the model, or what torch.compile(model) returned; for a compiled function, the model it calls",
        )
    before = {unit: dataclasses.replace(unit.comm_settings) for unit in module_state.units(module)}
    # Noted on modules, not on units: a plain model is sharded by its first call, which may be inside of the block.
    inside = [module_state.ensure_state(part) for part in module.modules()]
    for state in inside:
        state.no_sync_depth += 1
    try:
        switch(before, reduce_gradients=False, all_reduce=False)
        yield
    finally:
        for state in inside:
            state.no_sync_depth -= 1
        for unit in module_state.units(module):
            was = before.get(unit, CommSettings())
            switch([unit], reduce_gradients=was.reduce_gradients, all_reduce=was.all_reduce)


def switch(units: Iterable[FSDPUnit], **flags: bool) -> None:
    """Sets flags of `CommSettings`; the next forward follows them."""
    for unit in units:
        changed = dataclasses.replace(unit.comm_settings, **flags)
        if changed != unit.comm_settings:
            unit.comm_settings = changed
            for group in unit.param_groups:
                refresh_unshard_args(group)


def follow_no_sync(module: nn.Module, made: Iterable[FSDPUnit]) -> None:
    """Makes new units accumulate gradients if their model is inside of a `no_sync` block, or DDP's flag is off."""
    state = module_state.state_of(module)
    # Set before the first call has sharded the module; from now on it is a property of the module's class.
    asked = module.__dict__.pop(DDP_FLAG, True)
    if not asked or (state is not None and state.no_sync_depth):
        switch(made, reduce_gradients=False, all_reduce=False)


def collect(group: FSDPParamGroup, placement: GradPlacement, gradient: torch.Tensor) -> None:
    """Accumulates a gradient that autograd put into a gradient accumulator."""
    gradients.refuse_double_backward(group, gradient)
    update_in_backward.refuse_second(group)
    produced = group.grads.take_produced(placement)
    frozen = gradients.frozen_since(group, produced)
    # Its reduce-scatter took the unsharded accumulated gradient along.
    if placement is GradPlacement.REDUCE_SCATTERED:
        group.grads.unsharded_accumulated_grad.commit()
    group.grads.stage(placement).add(gradient, produced - frozen, without=frozen)
    if grad_placement_of(group) is not placement:  # the next reads may be such that reduce it further
        refresh_unshard_args(group)


def roll_back(group: FSDPParamGroup) -> None:
    """Makes gradients pending again that a graph consumed and never reduced."""
    if group.grads.roll_back():
        refresh_unshard_args(group)


def reduce_rest(group: FSDPParamGroup) -> None:
    """Reduces pending gradients as far as the unit asks for now, and adds them to the parameters' `.grad`.

    Some are pending after a backward whose forward ran without reduction, and for parameters that the last microbatch
    did not use.
    """
    with profiled(Range.REDUCE, [group.unit.name]):
        _reduce_rest(group)


def _reduce_rest(group: FSDPParamGroup) -> None:
    placement = grad_placement_of(group)
    spec = group.params[0].spec
    full = group.grads.unsharded_accumulated_grad.drain() if placement is not GradPlacement.UNREDUCED else None
    if full is not None:
        read_order.note(group, Done.REDUCED_REST)
        part = sum_over_shards(full.value.to(spec.reduce_dtype), spec)
        group.grads.partial_reduce_output.add(part.to(spec.unreduced_dtype), full.offsets)
    summed = group.grads.partial_reduce_output.drain() if placement is GradPlacement.REDUCED else None
    if summed is not None:
        read_order.note(group, Done.REDUCED_REST)
        gradient = sum_over_replicas(summed.value.to(spec.reduce_dtype), spec).to(group.flat_param)
        gradients.accumulate_sharded_grads(group, gradient, summed.offsets)
    if full is not None or summed is not None:
        refresh_unshard_args(group)
