"""A plan as data: what the passes make of a model, and numbers that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from fsdp_compile.cost.communicate import COPIES
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.explain.build.numbers import numbers
from fsdp_compile.explain.report import GraphPlan, LowerBound, Number, Skipped, UnitPlan, Volume
from fsdp_compile.explain.trace.open_sizes import OpenSizes
from fsdp_compile.explain.units import UnitData
from fsdp_compile.ir.graph import Phase, StepGraph
from fsdp_compile.options import FSDPOptions


@dataclasses.dataclass(frozen=True)
class TracedGraphs:
    """One compiled region as it was traced.

    Attributes:
        steps: Its graphs before the first pass, forward first.
        sizes: What the symbols in them mean; none, unless dimensions of the inputs are open.
        whole: Whether they are all of the model.
        recomputed: How many blocks backward computes again, as its budget took on the ranks that it was traced for.
    """

    steps: tuple[StepGraph, ...]
    sizes: OpenSizes
    whole: bool
    recomputed: int


@dataclasses.dataclass(frozen=True)
class Traced:
    """What plans are made of: the stand-in that was traced, its units and regions, and the settings of the compile."""

    model: nn.Module
    units: tuple[UnitData, ...]
    regions: tuple[TracedGraphs, ...]
    world_size: int
    options: FSDPOptions
    fusion: Fusion

    @property
    def may_send_low_bits(self) -> bool:
        """Whether some parameters are sent in 8 bits or fewer, if the share of a rank is large enough."""
        return getattr(self.options.mp_policy, "gather_dtype", None) is not None or any(
            param.spec.gather_format for unit in self.units for param in unit.params
        )


@dataclasses.dataclass(frozen=True)
class PlanData:
    """What the passes make of a model.

    Attributes:
        units: All units, in registration order.
        graphs: In the order in which they run: forwards, then backwards.
        volume: Communication of one step.
        bound: What no schedule can beat in the same memory.
        skipped: What is not done, and why.
        sizes: Of the dimensions that were open when the model was traced, by name.
        traced: The graphs before the passes, for `at`; `None` for a model that has run.
        steps: For each region the graphs after the passes, for `formulas`; none for a model that has run.
    """

    title: str
    world_size: int
    hardware: Hardware
    units: tuple[UnitPlan, ...]
    graphs: tuple[GraphPlan, ...]
    volume: Volume
    bound: LowerBound
    skipped: tuple[Skipped, ...]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    traced: Traced | None = dataclasses.field(default=None, repr=False, compare=False)
    steps: tuple[tuple[StepGraph, ...], ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def forward(self) -> tuple[GraphPlan, ...]:
        """Forward graphs; more than one after graph breaks."""
        return tuple(graph for graph in self.graphs if graph.phase is Phase.FORWARD)

    @property
    def backward(self) -> tuple[GraphPlan, ...]:
        """Backward graphs; none without gradients."""
        return tuple(graph for graph in self.graphs if graph.phase is Phase.BACKWARD)

    @property
    def links(self) -> str:
        """Names of the links that collectives are sent on."""
        used = dict.fromkeys(c.link for graph in self.graphs for c in graph.sent if c.kind not in COPIES)
        return ", ".join(used) or self.hardware.links

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes of collectives and copies, those of one link side by side."""
        return tuple(sorted({c.lane for graph in self.graphs for c in graph.sent}))

    @property
    def numbers(self) -> tuple[Number, ...]:
        """What times were estimated with, and where each number comes from."""
        return tuple(numbers(self.hardware, [c for graph in self.graphs for c in graph.sent]))

    @property
    def step_us(self) -> float:
        """Estimated time of forward and backward."""
        return sum(graph.end_us for graph in self.graphs)

    @property
    def busy_us(self) -> float:
        """All compute, or all communication of this plan, whichever takes longer."""
        return max(sum(g.compute_us for g in self.graphs), sum(g.communication_us for g in self.graphs))

    @property
    def peak_bytes(self) -> int:
        """The largest sum of live bytes in any graph."""
        return max((graph.memory.peak_bytes for graph in self.graphs), default=0)

    @property
    def host_bytes(self) -> int:
        """Host memory of one rank: offloaded shards and gradients, without optimizer state."""
        return sum(unit.host_bytes for unit in self.units)
