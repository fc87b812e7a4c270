"""What compiled models run: the graphs of each compiled region as the passes left them, for `explain(compiled)`.

Lowering consumes a graph, so a copy of its nodes is kept for as long as one of the units that it reads is alive.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch

from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.runtime.units import FSDPParamGroup, FSDPUnit


@dataclasses.dataclass(eq=False)
class CompiledRegion:
    """One compiled region.

    Attributes:
        number: Regions are numbered in the order in which they are compiled.
        lower: Who runs its graphs, as in `FSDPOptions.lower`.
        steps: Copies of its graphs, forward first.
    """

    number: int
    lower: str
    steps: list[StepGraph] = dataclasses.field(default_factory=list)

    def add(self, step: StepGraph) -> None:
        """Keeps a copy of a transformed graph."""
        self.steps.append(step.copy())


_numbers = itertools.count()
_regions: weakref.WeakKeyDictionary[FSDPUnit, dict[tuple[int, ...], CompiledRegion]] = weakref.WeakKeyDictionary()
"""Regions by a unit that they read, and there by the parameter groups that they read."""


def register_region(inputs: Sequence[object], lower: str) -> CompiledRegion:
    """Makes a place for the graphs of a region; of several compiles of one region the last stays.

    Args:
        inputs: Example inputs of Dynamo's graph; the units of its parameter groups keep the region.
        lower: As in `FSDPOptions.lower`.
    """
    found = [FSDPParamGroup.of(value) for value in inputs if isinstance(value, torch.Tensor)]
    flats = [flat for flat in found if flat is not None]
    ran = CompiledRegion(next(_numbers), lower)
    key = tuple(id(flat) for flat in flats)
    for unit in {flat.unit for flat in flats}:
        held = _regions.setdefault(unit, {})
        if torch.is_grad_enabled() or key not in held:  # evaluation does not replace training
            held[key] = ran
    return ran


def regions_of(units: Iterable[FSDPUnit]) -> list[CompiledRegion]:
    """Regions that read any of `units`, each once, in the order in which they were compiled."""
    found = {ran for unit in units for ran in _regions.get(unit, {}).values() if ran.steps}
    return sorted(found, key=lambda ran: ran.number)
