"""`no_sync`, and the switches behind it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from torch import nn

from fsdp_compile.errors import ConfigError
from fsdp_compile.parameters.unit import Accumulation, Unit
from fsdp_compile.parameters.variants import publish, respecify

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
    before = {unit: dataclasses.replace(unit.accumulation) for unit in _units(model)}
    _active.append(model)
    try:
        switch(before, reduce_gradients=False, all_reduce=False)
        yield
    finally:
        _active.remove(model)
        for unit in _units(model):
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


def set_division(units: Iterable[Unit], **settings: float | bool | None) -> None:
    """Sets `divide` or `sum_only` of `Accumulation`.

    Raises:
        ConfigError: If the user's own function reduces the gradients, and so divides them.
    """
    for unit in units:
        if unit.hook is not None and unit.hook.key:
            raise ConfigError(
                "the model has a communication hook, which divides by itself",
                where=f"{', '.join(settings)} of unit {unit.title}",
                instead="divide in the hook",
            )
        changed = dataclasses.replace(unit.accumulation, **settings)  # type: ignore[arg-type]
        if changed != unit.accumulation:
            unit.accumulation = changed
            respecify(unit)


def follow_active(module: nn.Module, made: Iterable[Unit]) -> None:
    """Lets units that were just made hold their gradients back if their model is inside of a `no_sync` block."""
    if any(module is part for model in _active for part in model.modules()):
        switch(made, reduce_gradients=False, all_reduce=False)


def _units(model: nn.Module) -> list[Unit]:
    from fsdp_compile.parameters.sharding import units  # it needs this module

    return units(model)
