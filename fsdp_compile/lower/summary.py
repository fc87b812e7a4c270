"""What is known of a transformed graph without its nodes: it is stored beside the graph's code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fsdp_compile.lower.graph_text import GraphText
from fsdp_compile.lower.surroundings import Surroundings
from fsdp_compile.lower.wrappers import Compiled


@dataclasses.dataclass(frozen=True)
class GraphSummary:
    """One graph of a compiled region.

    Attributes:
        surroundings: What runs around its code.
        collectives: A line for each collective, by the alias of its process group: what ranks compare.
        graph: For reports.
    """

    surroundings: Surroundings
    collectives: Mapping[str, Sequence[str]]
    graph: GraphText

    def around(self, compiled: Compiled) -> Compiled:
        """The code with what runs around it."""
        return self.surroundings.around(compiled)
