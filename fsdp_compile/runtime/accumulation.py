"""`no_sync`, and the switches behind it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from torch import nn

from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.spec import Sync
from fsdp_compile.ops.unshard import sum_over_replicas, sum_over_shards
from fsdp_compile.runtime import gradients, module_state
from fsdp_compile.runtime.group_state import Accumulation, HeldGradients
from fsdp_compile.runtime.units import FlatShard, Unit
from fsdp_compile.runtime.unshard_args import publish, sync_of

_active: list[nn.Module] = []
"""Models inside of a `no_sync` block, innermost last."""


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without communication: forwards inside of the block keep theirs whole on each rank.

    The next backward outside of it adds them to its own gradients and reduces the sum once. What a backward will do is
    decided when its forward runs. Held gradients take the memory of a full gradient, in the dtype of reductions; they
    are not in `.grad`, and `zero_grad()` does not drop them.

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
    before = {unit: dataclasses.replace(unit.accumulation) for unit in module_state.units(model)}
    _active.append(model)
    try:
        switch(before, reduce_gradients=False, all_reduce=False)
        yield
    finally:
        _active.remove(model)
        for unit in module_state.units(model):
            was = before.get(unit, Accumulation())
            switch([unit], reduce_gradients=was.reduce_gradients, all_reduce=was.all_reduce)


def switch(units: Iterable[Unit], **flags: bool) -> None:
    """Sets flags of `Accumulation`; the next forward follows them."""
    for unit in units:
        changed = dataclasses.replace(unit.accumulation, **flags)
        if changed != unit.accumulation:
            unit.accumulation = changed
            for flat in unit.flats:
                publish(flat)


def follow_active(module: nn.Module, made: Iterable[Unit]) -> None:
    """Lets units that were just made hold their gradients back if their model is inside of a `no_sync` block."""
    if any(module is part for model in _active for part in model.modules()):
        switch(made, reduce_gradients=False, all_reduce=False)


def place_of(flat: FlatShard, sync: Sync) -> HeldGradients:
    """Where gradients are collected that are summed as far as `sync`, which is not all the way."""
    return flat.held if sync is Sync.NONE else flat.partial


def reduce_rest(flat: FlatShard) -> None:
    """Reduces, as far as the unit asks for now, what no graph has taken along, and adds it to the parameters' `.grad`.

    That is the case after a backward whose forward ran while gradients were held back, and for parameters that the last
    microbatch did not use.
    """
    sync = sync_of(flat)
    spec = flat.slots[0].spec
    full = flat.held.take_all() if sync is not Sync.NONE else None
    if full is not None:
        flat.partial.add(sum_over_shards(full.value, spec), full.offsets)
    summed = flat.partial.take_all() if sync is Sync.ALL else None
    if summed is not None:
        gradient = sum_over_replicas(summed.value, spec).to(flat.leaf)
        gradients.deliver(flat, gradient, summed.offsets)
    if full is not None or summed is not None:
        publish(flat)
