"""The graph that passes receive."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import fx

from fsdp_compile.ir.record import Phase, Role, role_of


@dataclasses.dataclass
class StepGraph:
    """The forward or the backward graph of one compiled region.

    Attributes:
        gm: The graph module; passes edit its graph in place.
        phase: Forward (also when there is no backward) or backward.
    """

    gm: fx.GraphModule
    phase: Phase

    @property
    def graph(self) -> fx.Graph:
        """The FX graph."""
        return self.gm.graph

    def nodes(self, *roles: Role) -> Iterator[fx.Node]:
        """Nodes of the given roles in graph order."""
        return (node for node in self.graph.nodes if role_of(node) in roles)

    def order(self) -> dict[fx.Node, int]:
        """Position of each node; valid until the next edit."""
        return {node: index for index, node in enumerate(self.graph.nodes)}

    def copy(self) -> StepGraph:
        """The same graph in nodes of its own; records, fake values and code that nodes came from are shared."""
        copied = fx.Graph()
        returned = copied.graph_copy(self.graph, {})
        copied.output(returned).meta.update(self.output.meta)
        return StepGraph(fx.GraphModule(self.gm, copied), self.phase)

    @property
    def output(self) -> fx.Node:
        """The output node."""
        return self.graph.output_node()
