"""A transformed graph as it is stored: its text, and what AOTAutograd says of its results, which no text has."""

from __future__ import annotations

import dataclasses

from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.text.parser import parse_graph
from fsdp_compile.ir.text.printer import format_graph


@dataclasses.dataclass(frozen=True)
class GraphText:
    """A graph that can be pickled.

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
