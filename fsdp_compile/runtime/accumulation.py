"""`no_sync`, and the switches behind it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from torch import nn

from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.ops.unshard import sum_over_replicas, sum_over_shards
from fsdp_compile.runtime import gradients, module_state
from fsdp_compile.runtime.group_state import CommSettings, PendingGrads
from fsdp_compile.runtime.units import FSDPParamGroup, FSDPUnit
from fsdp_compile.runtime.unshard_args import grad_placement_of, refresh_unshard_args

_active: list[nn.Module] = []
"""Models inside of a `no_sync` block, innermost last."""


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without communication: forwards inside of the block keep theirs whole on each rank.

    The next backward outside of it adds them to its own gradients and reduces the sum once. What a backward will do is
    decided when its forward runs. Unreduced gradients take the memory of a full gradient, in the dtype of reductions;
    they are not in `.grad`, and `zero_grad()` does not drop them.

    Args:
        model: The model, compiled or not. One that is sharded by its first call inside of the block follows it.

    Raises:
        ConfigError: If `model` is no module.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{type(model).__name__} is not a torch.nn.Module",
            where="no_sync(model)",
            instead="the model, or what torch.compile(model) returned; for a compiled function, the model it calls",
        )
    before = {unit: dataclasses.replace(unit.comm_settings) for unit in module_state.units(model)}
    _active.append(model)
    try:
        switch(before, reduce_gradients=False, all_reduce=False)
        yield
    finally:
        _active.remove(model)
        for unit in module_state.units(model):
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


def follow_active(module: nn.Module, made: Iterable[FSDPUnit]) -> None:
    """Lets units that were just made hold their gradients back if their model is inside of a `no_sync` block."""
    if any(module is part for model in _active for part in model.modules()):
        switch(made, reduce_gradients=False, all_reduce=False)


def pending_grads_of(group: FSDPParamGroup, placement: GradPlacement) -> PendingGrads:
    """Where gradients are collected that are summed as far as `placement`, which is not all the way."""
    return group.unsharded_accumulated_grad if placement is GradPlacement.UNREDUCED else group.partial_reduce_output


def reduce_rest(group: FSDPParamGroup) -> None:
    """Reduces, as far as the unit asks for now, what no graph has taken along, and adds it to the parameters' `.grad`.

    That is the case after a backward whose forward ran while gradients were held back, and for parameters that the last
    microbatch did not use.
    """
    placement = grad_placement_of(group)
    spec = group.params[0].spec
    full = group.unsharded_accumulated_grad.drain() if placement is not GradPlacement.UNREDUCED else None
    if full is not None:
        group.partial_reduce_output.add(sum_over_shards(full.value, spec), full.offsets)
    summed = group.partial_reduce_output.drain() if placement is GradPlacement.REDUCED else None
    if summed is not None:
        gradient = sum_over_replicas(summed.value, spec).to(group.flat_param)
        gradients.accumulate_sharded_grads(group, gradient, summed.offsets)
    if full is not None or summed is not None:
        refresh_unshard_args(group)
