"""`full_params`: inside of it, modules hold plain, full parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from torch import nn

from fsdp_compile._torch import backward_in_progress
from fsdp_compile.errors import ConfigError
from fsdp_compile.parameters import integrity
from fsdp_compile.parameters.flat import ParameterSlot
from fsdp_compile.parameters.forward_depth import in_forward
from fsdp_compile.parameters.held import HeldSlot, Wish
from fsdp_compile.parameters.reads import READS, note_layout, original_class, read_as_written
from fsdp_compile.parameters.unit import Holding, Unit


@contextlib.contextmanager
def full_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Lets modules hold plain, full parameters under their own names, in the dtype that is stored.

    All ranks enter and leave together, outside of forward and backward. Inside, `named_parameters()`, `state_dict()`,
    in-place writes and the forward of the plain module work as if nothing were sharded (the compiled one is refused).
    Parameters are gathered one after the other, and all that were asked for stand at once. Tied ones stay tied. What
    was kept of them (an optimizer made inside, say) is given the sharded parameters again afterwards.

    Args:
        module: The whole model, a compiled one, or a module in it. Without sharded parameters nothing happens.
        recurse: Everything below `module`, or only the parameters of the unit whose root `module` is.
        writeback: Keep what was written inside: each rank keeps its own part of what it holds, also if the block ends
            with an exception. Otherwise all changes are dropped, in a world of one rank too.
        rank0_only: Only the first rank of the mesh holds full parameters; others hold their shards. With `writeback`
            all ranks are given their parts of what the first one holds.
        offload_to_cpu: Full parameters are held in the memory of the host, one after the other leaving the device.
        with_grads: Full parameters have full gradients. With `writeback` these are kept likewise; one that was set to
            `None` is forgotten.

    Raises:
        ConfigError: Inside a forward, a backward or another `full_params` of the same unit; if a parameter is on the
            meta device; and when leaving, if a parameter was removed or changed its shape or `requires_grad`.
    """
    module = getattr(module, "_orig_mod", module)
    _refuse_inside_a_step()
    units = [unit for unit in _units_below(module) if recurse or unit.root is module]
    for unit in units:
        _check(unit)
    wish = Wish(writeback, rank0_only, offload_to_cpu, with_grads)
    held = _Held(units, [HeldSlot(unit, slot, wish) for unit in units for slot in _slots_in(module, unit)])
    try:
        held.take(module)
        yield
    except BaseException:
        held.give_back()
        raise
    problems = held.give_back()
    if problems:
        raise problems[0]


@dataclasses.dataclass
class _Held:
    """What one `full_params` holds.

    Attributes:
        units: Units of the parameters.
        slots: The parameters.
        classes: Modules that got their own class back, with the class that reads shards.
    """

    units: list[Unit]
    slots: list[HeldSlot]
    classes: list[tuple[nn.Module, type[nn.Module]]] = dataclasses.field(default_factory=list)

    def take(self, module: nn.Module) -> None:
        """Gathers and shows everything; where nothing below `module` stays sharded, forwards are the plain ones."""
        note_layout()
        for unit in self.units:
            unit.holding = Holding.FULL
        for slot in self.slots:
            slot.take()
        full = {held.slot for held in self.slots if held.plain is not None}
        below = {slot for unit in _units_below(module) for slot in _slots_in(module, unit)}
        if full and below <= full:
            for each in module.modules():
                if original_class(each) is not type(each):
                    self.classes.append((each, type(each)))
                    each.__class__ = original_class(each)

    def give_back(self) -> list[ConfigError]:
        """Shows the shards again, with what was written if that is to be kept.

        Returns:
            What could not be kept, alike on every rank that holds full parameters.
        """
        for module, sharded_class in self.classes:
            module.__class__ = sharded_class
            if READS in module.__dict__:
                read_as_written(module)  # which may have changed meanwhile
        problems = [slot.give_back() for slot in self.slots]
        for unit in self.units:
            unit.holding = Holding.SHARDS
        note_layout()
        return [problem for problem in problems if problem is not None]


def _refuse_inside_a_step() -> None:
    inside_backward = backward_in_progress() != -1
    if in_forward() or inside_backward:
        raise ConfigError(
            "parameters cannot be held in full inside a step",
            where=f"full_params() in a {'backward' if inside_backward else 'forward'}",
            instead="full_params(model) before or after it; inside a forward, self.weight is the full parameter anyway",
        )


def _check(unit: Unit) -> None:
    if unit.holding is Holding.FULL:
        raise ConfigError(
            "its parameters are held in full already",
            where=f"full_params(), unit {unit.title}",
            instead="one full_params() around both blocks",
        )
    integrity.check(unit)


def _units_below(module: nn.Module) -> list[Unit]:
    """Units that modules at and below `module` read from."""
    reads = [read for m in module.modules() for read in m.__dict__.get(READS, {}).values()]
    return list(dict.fromkeys(flat.unit for _, _, flat in reads))


def _slots_in(module: nn.Module, unit: Unit) -> Iterator[ParameterSlot]:
    """The parameters of a unit that modules at and below `module` hold."""
    inside = set(module.modules())
    return (slot for slot in unit.slots if any(owner in inside for owner, _ in slot.owners))
