"""What is known of a transformed graph without its nodes: it is stored beside the graph's code."""

from __future__ import annotations

import dataclasses

from fsdp_compile.ir.graph import Phase
from fsdp_compile.lower.compiled_step import Compiled, CompiledStep
from fsdp_compile.lower.graph_text import GraphText
from fsdp_compile.lower.shared_plan import Compared


@dataclasses.dataclass(frozen=True)
class GraphSummary:
    """One graph of a compiled region.

    Attributes:
        step: What runs before and after its code.
        compared: What ranks compare.
        graph: For reports.
    """

    step: CompiledStep
    compared: Compared
    graph: GraphText

    @property
    def phase(self) -> Phase:
        """Which graph it is."""
        return self.step.phase

    def around(self, compiled: Compiled) -> Compiled:
        """The code with what runs around it."""
        return self.step.around(compiled)
