"""What `explain` returns: a plan, with methods that show it and that make others from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fsdp_compile.cost.communicate import COPIES
from fsdp_compile.cost.hardware import Hardware, hardware
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.report import GraphPlan, Number, Skipped, UnitPlan, Volume
from fsdp_compile.explain.tables import as_text, page, parts, to_plain
from fsdp_compile.ir.graph import Phase, StepGraph

if TYPE_CHECKING:
    from fsdp_compile.explain.rescale import Traced


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the passes make of a model; `print` it, save it as a page, or read it as data.

    Attributes:
        units: All units, in registration order.
        graphs: In the order in which they run: forwards, then backwards.
        volume: Communication of one step.
        skipped: What is not done, and why.
        numbers: What times were estimated with, and where each number comes from.
        traced: The graphs before the passes, for `at`; `None` for a model that has run.
        steps: For each region the graphs after the passes; none for a model that has run.
    """

    title: str
    world_size: int
    hardware: Hardware
    units: tuple[UnitPlan, ...]
    graphs: tuple[GraphPlan, ...]
    volume: Volume
    skipped: tuple[Skipped, ...]
    numbers: tuple[Number, ...]
    traced: Traced | None = dataclasses.field(default=None, repr=False, compare=False)
    steps: tuple[tuple[StepGraph, ...], ...] = dataclasses.field(default=(), repr=False, compare=False)
    derived: ClassVar = ("step_us", "busy_us", "peak_bytes", "host_bytes", "links", "lanes")

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
    def step_us(self) -> float:
        """Estimated time of forward and backward."""
        return sum(graph.end_us for graph in self.graphs)

    @property
    def compute_us(self) -> float:
        """Computing alone."""
        return sum(graph.compute_us for graph in self.graphs)

    @property
    def communication_us(self) -> float:
        """Time of the busiest link of each graph."""
        return sum(graph.communication_us for graph in self.graphs)

    @property
    def exposed_us(self) -> float:
        """How long compute stands still."""
        return sum(graph.exposed_us for graph in self.graphs)

    @property
    def busy_us(self) -> float:
        """All compute, or all communication of this plan, whichever takes longer."""
        return max(self.compute_us, self.communication_us)

    @property
    def peak_bytes(self) -> int:
        """The largest sum of live bytes in any graph."""
        return max((graph.memory.peak_bytes for graph in self.graphs), default=0)

    @property
    def shard_bytes(self) -> int:
        """Sharded parameters of one rank, padding included."""
        return sum(unit.shard_bytes for unit in self.units)

    @property
    def host_bytes(self) -> int:
        """Host memory of one rank: offloaded shards and gradients, without optimizer state."""
        return sum(unit.host_bytes for unit in self.units)

    def at(self, *, world_size: int | None = None, gb_per_s: float | None = None) -> Plan:
        """The plan for other ranks or another link; the passes run again, the model is not traced again.

        Args:
            world_size: Ranks that share the parameters.
            gb_per_s: What one rank sends in one direction, 1e9 byte/s.

        Raises:
            ConfigError: For a number that is not positive, a model that has run already, other ranks of a mesh of two
                dimensions or of a part of the world, or other ranks where blocks are computed again for a budget.
        """
        if self.traced is None:
            raise ConfigError(
                "the plan is of a model that has run, on the ranks that there were, and has no graphs to plan anew",
                where="Plan.at(...)",
                instead="explain() the plain model before it is sharded",
            )
        link = self.hardware.link if gb_per_s is None else hardware(link=gb_per_s).link
        ranks = self.world_size if world_size is None else world_size
        return self.traced.planned(ranks, dataclasses.replace(self.hardware, link=link))

    def __str__(self) -> str:
        return as_text(parts(self), width=80)

    def save_html(self, path: str | Path) -> Path:
        """Writes one self-contained page and returns its path."""
        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, ready for JSON; units are in the names of the fields."""
        return to_plain(self)
