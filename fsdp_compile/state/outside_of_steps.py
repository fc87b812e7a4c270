"""What reads or writes whole models between steps: refused inside of one, and where parameters are not sharded now."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_compile._torch.autograd import backward_in_progress
from fsdp_compile.errors import ConfigError
from fsdp_compile.modules.forward import in_forward
from fsdp_compile.runtime.group_state import ParamState
from fsdp_compile.runtime.units import FSDPUnit
from fsdp_compile.sharding import views


def refuse_inside_a_step(where: str, *, what: str, instead: str) -> None:
    """Raises `ConfigError` inside of a forward or a backward.

    Args:
        where: The call that is refused there.
        what: What is wrong.
        instead: What to write.
    """
    inside_backward = backward_in_progress() != -1
    if in_forward() or inside_backward:
        raise ConfigError(what, where=f"{where} in a {'backward' if inside_backward else 'forward'}", instead=instead)


def check(units: Iterable[FSDPUnit], where: str, *, instead: str) -> None:
    """Makes every parameter of some units a view again.

    Args:
        units: Of the model.
        where: The call that needs them.
        instead: What to write if `full_params` holds them.

    Raises:
        ConfigError: If parameters are held in full or on the meta device, or as `views.put_in_place` does.
    """
    for unit in units:
        if unit.param_state is ParamState.UNSHARDED:
            raise ConfigError(
                "its parameters are held in full already", where=f"{where}, unit {unit.title}", instead=instead
            )
        views.check(unit)
