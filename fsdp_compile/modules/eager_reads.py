"""What eager forwards read: gathered parameters, which must not be written to, or values put in their place.

A gathered parameter is a copy, so what a forward writes into it would be lost. Each read is checked for writes when the
next one is made, and all that are still referred to when the outermost forward ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.layout.profiler_ranges import Range, profiled
from fsdp_compile.runtime.module_state import reads_of
from fsdp_compile.runtime.unshard_args import swap_in, swapped_value

reads = threading.local()
"""Gathered parameters of the outermost forward that runs: `made`, and the `last` one itself."""


class GatheredParameter(nn.Parameter):
    """A full parameter in an eager forward: an `nn.Parameter`, as in one process, but no leaf of autograd."""

    @property
    def data(self) -> torch.Tensor:
        """The value without history; unlike `Tensor.data`, writes into it count as writes into the parameter."""
        return self.detach()

    @data.setter
    def data(self, _value: torch.Tensor) -> None:
        raise _refusal("a gathered parameter, by `.data = ...`")


class _Read(NamedTuple):
    """A gathered parameter, its version when it was made, and its name for errors."""

    gathered: weakref.ref[torch.Tensor]
    version: int
    name: str

    def check(self) -> None:
        gathered = self.gathered()
        if gathered is not None and _version(gathered) != self.version:
            raise _refusal(self.name)


@torch.compiler.disable
def read_eagerly(module: nn.Module, name: str, gather: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor | None:
    """A sharded parameter in an eager forward: gathered, or what is registered or was assigned in its place."""
    held = registered(module, name)
    if _is_swapped(module, name):
        return held
    with profiled(Range.ALL_GATHER, [reads_of(module)[name].group.unit.name]):
        gathered = gather(module)
    return note_read(gathered, module, name)


def registered(module: nn.Module, name: str) -> torch.Tensor | None:
    """What is registered as a module's parameter, or was assigned in its place; raises `AttributeError` if nothing."""
    if name in module._parameters:
        return module._parameters[name]
    swapped = swapped_value(module, name)
    if swapped is None:
        raise AttributeError(f"{_title(module)!r} object has no attribute {name!r}")
    return swapped


def _is_swapped(module: nn.Module, name: str) -> bool:
    return module._parameters.get(name) is not reads_of(module)[name].param.parameter


def show_values(root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Makes compiled code below `root` read values that are registered in the place of sharded parameters."""
    # Dynamo guards on few attributes of a module, not on each of its parameters.
    places = [(m, name) for m in root.modules() for name in reads_of(m) if name in m._parameters]
    shown = [(m, name) for m, name in places if _is_swapped(m, name)]
    for module, name in shown:
        swap_in(module, name, module._parameters[name])
    return shown


def hide_values(shown: list[tuple[nn.Module, str]]) -> None:
    """Undoes `show_values`."""
    for module, name in shown:
        swap_in(module, name, None)


def holds_value(module: nn.Module, name: str) -> bool:
    """Whether a plain value stands in the place of a sharded parameter; a new `nn.Parameter` is to be sharded."""
    if name in module._parameters:
        held = module._parameters[name]
        return held is not None and not isinstance(held, nn.Parameter)
    return swapped_value(module, name) is not None


def holds_values(root: nn.Module) -> bool:
    """Whether `holds_value` is true for a parameter of a module in `root`."""
    return any(holds_value(module, name) for module in root.modules() for name in reads_of(module))


def note_read(gathered: torch.Tensor, module: nn.Module, name: str) -> torch.Tensor:
    """Checks the last read of this forward for writes, and makes `gathered` the one to check next."""
    made: list[_Read] = reads.__dict__.setdefault("made", [])
    if made:
        made[-1].check()
    made.append(_Read(weakref.ref(gathered), _version(gathered), f"parameter {name} of {_title(module)}"))
    # A write may be the only use: without a reference there would be nothing left to check.
    reads.last = gathered
    return gathered


@torch.compiler.disable
def check_reads() -> None:
    """Raises `UnsupportedModelError` if a parameter was written to that this thread's forward has gathered."""
    for read in reads.made:
        read.check()


def _version(gathered: torch.Tensor) -> int:
    return 0 if gathered.is_inference() else gathered._version  # in inference mode nothing is counted


def _title(module: nn.Module) -> str:
    return getattr(module, "_fsdp_original_class", type(module)).__name__


def _refusal(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "a forward changes a gathered parameter in place, which would be lost",
        where=name,
        instead="do it between steps, or under torch.no_grad() on the parameter that parameters() gives",
    )
