"""torch's optimizers whose update of a DTensor fails inside of torch: refused by name before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import optim

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.runtime.units import sharded_parameters

SEES_WHOLE = "_fsdp_whole"
"""Attribute of an optimizer that sees full parameters or gradients (`whole_step`)."""
_FLAT = "fsdp_compile.flat_step(optimizer), which updates whole flat parameters"


class _Refusal(NamedTuple):
    """What an optimizer does that DTensors cannot, and whether its settings make it do so."""

    what: str
    instead: str
    applies: Callable[[optim.Optimizer], bool] = lambda _: True


def _is_fused(optimizer: optim.Optimizer) -> bool:
    return any(group.get("fused") for group in optimizer.param_groups)


_REFUSED: dict[type[optim.Optimizer], _Refusal] = {
    optim.Rprop: _Refusal("Rprop writes with masks, which torch cannot do on sharded parameters", _FLAT),
    optim.SGD: _Refusal("fused SGD has no kernel for sharded parameters", f"{_FLAT}; or fused=False", _is_fused),
    optim.Adagrad: _Refusal(
        "fused Adagrad has no kernel for sharded parameters", f"{_FLAT}; or fused=False", _is_fused
    ),
    optim.Adafactor: _Refusal(
        "Adafactor raises norms to powers in place, which torch cannot do on sharded parameters",
        "fsdp_compile.whole_step(optimizer), which updates one full parameter at a time",
    ),
}


def refuse(optimizer: optim.Optimizer) -> None:
    """Raises `UnsupportedModelError` if an optimizer cannot update some of its parameters, which are sharded."""
    refusal = _REFUSED.get(type(optimizer))
    if refusal is None or SEES_WHOLE in vars(optimizer) or not refusal.applies(optimizer):
        return
    sharded = sharded_parameters()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in sharded:
                raise UnsupportedModelError(
                    refusal.what,
                    where=f"{type(optimizer).__name__}.step(), parameter {sharded[parameter].name} of shape "
                    f"{tuple(parameter.shape)}",
                    instead=refusal.instead,
                )
