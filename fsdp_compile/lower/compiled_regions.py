"""The graphs of each compiled region as the passes left them, for `explain(compiled)`.

Lowering consumes a graph, so each unit that it reads stores a copy of its nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.fsdp2.unit import Unit
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph


@dataclasses.dataclass(frozen=True)
class GraphText:
    """A transformed graph as it is stored: its text, and what AOTAutograd says of its results, which no text has.

    Attributes:
        text: As `format_graph` writes it.
        results: A description of each result: which ones are saved for backward.
    """

    text: str
    results: tuple[object, ...]

    @staticmethod
    def of(step: StepGraph) -> GraphText:
        """The text of a graph."""
        return GraphText(format_graph(step), tuple(step.output.meta.get("desc") or ()))

    def read(self) -> StepGraph:
        """The graph, with fake values and records."""
        step = parse_graph(self.text)
        step.output.meta["desc"] = list(self.results)
        return step


@dataclasses.dataclass(eq=False)
class CompiledRegion:
    """One compiled region; `number` counts the regions of a model in the order of their compiles.

    Attributes:
        graphs: The transformed ones, forward first; the text of each where the code was loaded.
    """

    number: int
    lower: str
    graphs: list[StepGraph | GraphText] = dataclasses.field(default_factory=list)

    def add(self, graph: StepGraph | GraphText) -> None:
        """Stores a copy of a transformed graph, or its text."""
        self.graphs.append(graph if isinstance(graph, GraphText) else graph.copy())

    @property
    def steps(self) -> list[StepGraph]:
        """The transformed graphs."""
        self.graphs = [each.read() if isinstance(each, GraphText) else each for each in self.graphs]
        return [each for each in self.graphs if isinstance(each, StepGraph)]


def register_region(groups: Sequence[ParamGroup], lower: str) -> CompiledRegion:
    """Makes a region for the graphs of a compile; of several compiles of one region the last is stored.

    The units of the parameter groups that it reads store it; `lower` is as in `FSDPOptions.lower`.
    """
    units: list[Unit] = list(dict.fromkeys(group.unit for group in groups))
    of_models = {unit for model in {unit.model for unit in units} for unit in model.units}
    earlier = [region.number for unit in of_models for region in unit.compiled_regions.values()]
    region = CompiledRegion(max(earlier, default=-1) + 1, lower)
    key = tuple(map(id, groups))
    for unit in units:
        if torch.is_grad_enabled() or key not in unit.compiled_regions:  # evaluation does not replace training
            unit.compiled_regions[key] = region
    return region


def regions_of(units: Iterable[Unit]) -> list[CompiledRegion]:
    """Regions that read any of `units`, each once, in the order in which they were compiled."""
    found = {region for unit in units for region in unit.compiled_regions.values() if region.graphs}
    return sorted(found, key=lambda region: region.number)
