"""The graphs of each compiled region as the passes left them, for `explain(compiled)`.

Lowering consumes a graph, so each unit that it reads stores a copy of its nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.unit import Unit
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.options import FSDPOptions


@dataclasses.dataclass(eq=False)
class CompiledRegion:
    """One compiled region; `number` counts the regions of a model in the order of their compiles.

    Attributes:
        lower: As in `FSDPOptions.lower`.
        hardware: What it was planned for, if that was given.
        steps: The transformed graphs, forward first.
    """

    number: int
    lower: str
    hardware: Hardware | None
    steps: list[StepGraph] = dataclasses.field(default_factory=list)


def register_region(groups: Sequence[ParamGroup], options: FSDPOptions) -> CompiledRegion:
    """Makes a region for the graphs of a compile; of several compiles of one region the last is kept.

    The units of the parameter groups that it reads store it.
    """
    units: list[Unit] = list(dict.fromkeys(group.unit for group in groups))
    of_models = {unit for model in {unit.model for unit in units} for unit in model.units}
    earlier = [region.number for unit in of_models for region in unit.compiled_regions.values()]
    region = CompiledRegion(max(earlier, default=-1) + 1, options.lower, options.planned_for)
    key = tuple(map(id, groups))
    for unit in units:
        if torch.is_grad_enabled() or key not in unit.compiled_regions:  # evaluation does not replace training
            unit.compiled_regions[key] = region
    return region


def regions_of(units: Iterable[Unit]) -> list[CompiledRegion]:
    """Regions that read any of `units`, each once, in the order in which they were compiled."""
    found = {region for unit in units for region in unit.compiled_regions.values() if region.steps}
    return sorted(found, key=lambda region: region.number)
