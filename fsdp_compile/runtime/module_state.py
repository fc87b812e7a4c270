"""What a call of `fully_shard` leaves on a module, and the only functions that walk modules for it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator

from torch import nn

from fsdp_compile.config.policy import MixedPrecision
from fsdp_compile.runtime.units import READS, FSDPParam, FSDPUnit


def units_below(module: nn.Module) -> list[FSDPUnit]:
    """Units that modules at and below `module` read from."""
    reads = [read for m in module.modules() for read in m.__dict__.get(READS, {}).values()]
    return list(dict.fromkeys(group.unit for _, _, group in reads))


def params_in(module: nn.Module, unit: FSDPUnit) -> Iterator[FSDPParam]:
    """The parameters of a unit that modules at and below `module` hold."""
    inside = set(module.modules())
    return (param for param in unit.params if any(owner in inside for owner, _ in param.module_refs))


class Nesting(enum.Enum):
    """Where in the sharded model a module is."""

    OUTERMOST = "outermost"
    INSIDE = "inside"


ParamOwner = tuple[nn.Module, str]
"""The first module that holds a parameter, and the attribute."""
ParamRef = tuple[str, nn.Module, str, nn.Parameter]
"""Name of the module, the module, the attribute, the parameter."""
_STATE = "_fsdp_sharding"


@dataclasses.dataclass
class Sharding:
    """What one call of `fully_shard` made.

    Attributes:
        units: Units that this call made, in registration order of their roots.
        ignored: `id`s of parameters that the call was told to leave alone.
        precision: The dtypes that it was called with.
        nesting: Whether a call on a module above it has followed.
    """

    units: list[FSDPUnit]
    ignored: set[int]
    precision: MixedPrecision
    nesting: Nesting = Nesting.OUTERMOST


def units(model: nn.Module) -> list[FSDPUnit]:
    """The units of a model, in registration order of their root modules; empty if nothing in it is sharded."""
    model = getattr(model, "_orig_mod", model)
    return [unit for m in _modules_below(model) if _STATE in m.__dict__ for unit in m.__dict__[_STATE].units]


def _modules_below(root: nn.Module) -> Iterable[nn.Module]:
    """What `root.modules()` gives, in that order, without making names: this runs once in every step."""
    found: dict[nn.Module, None] = {}
    todo: list[nn.Module | None] = [root]
    while todo:
        module = todo.pop()
        if module is not None and module not in found:
            found[module] = None
            todo.extend(reversed(module._modules.values()))
    return found


def units_of_call(module: nn.Module) -> list[FSDPUnit]:
    """The units that the call of `fully_shard` on this very module made."""
    return list(module.__dict__[_STATE].units) if _STATE in module.__dict__ else []


def is_ignored(root: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a call of `fully_shard` in `root` was told to leave `parameter` alone."""
    return any(id(parameter) in m.__dict__[_STATE].ignored for m in root.modules() if _STATE in m.__dict__)


def is_inside(module: nn.Module) -> bool:
    """Whether `module` is a part of a model of which a module above it is sharded, too."""
    asked = [module] if is_sharded(module) else [m for m in module.modules() if is_sharded(m)]
    return any(m.__dict__[_STATE].nesting is Nesting.INSIDE for m in asked)


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this very module."""
    return _STATE in module.__dict__
