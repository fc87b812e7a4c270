"""What `explain` returns, and the ways to look at it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.explain.report import GraphPlan, Skipped, UnitPlan, Volume
from fsdp_compile.ir.graph import Phase

if TYPE_CHECKING:
    from fsdp_compile.explain.scale.rescale import Traced
    from fsdp_compile.explain.scale.scaling import Scaling
    from fsdp_compile.explain.scale.symbolic import Formulas
    from fsdp_compile.ir.graph import StepGraph


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the passes make of a model; `print` it, save it as a page or a trace, or read it as data.

    Attributes:
        title: Name of the model.
        world_size: Ranks.
        hardware: What times are estimated for.
        units: All units, in registration order.
        graphs: In the order in which they run: forwards, then backwards.
        volume: Communication of one step.
        skipped: What is not done, and why.
        sizes: Of the dimensions that were open when the model was traced, by name.
        traced: The graphs before the passes, for `at`; `None` for a model that has run.
        steps: For each region the graphs behind the passes, for `formulas`; none for a model that has run.
    """

    title: str
    world_size: int
    hardware: Hardware
    units: tuple[UnitPlan, ...]
    graphs: tuple[GraphPlan, ...]
    volume: Volume
    skipped: tuple[Skipped, ...]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    traced: Traced | None = dataclasses.field(default=None, repr=False, compare=False)
    steps: tuple[tuple[StepGraph, ...], ...] = dataclasses.field(default=(), repr=False, compare=False)

    def at(
        self,
        *,
        world_size: int | None = None,
        gb_per_s: float | None = None,
        batch: int | None = None,
        sequence: int | None = None,
    ) -> Plan:
        """The plan for other ranks, another link or other sizes; the passes run again, the model is not traced again.

        Args:
            world_size: Ranks that share the parameters.
            gb_per_s: What one rank sends in one direction, 1e9 byte/s.
            batch: Size of the dimension that `explain(dims=...)` calls "batch".
            sequence: Size of the dimension that it calls "sequence".

        Raises:
            ConfigError: For a number that is not positive, a model that has run already, ranks of a mesh of two
                dimensions, or a size that was not open or for which the model's graph is another one.
        """
        from fsdp_compile.explain.scale.rescale import rescaled

        sizes = {"batch": batch, "sequence": sequence}
        return rescaled(self, world_size=world_size, gb_per_s=gb_per_s, sizes=sizes)

    def scaling(self, world_sizes: Sequence[int], *, gb_per_s: float | None = None) -> Scaling:
        """Times and memory for several numbers of ranks, as rows and to be drawn; the model is not traced again.

        Args:
            world_sizes: Numbers of ranks, each with inputs of the size that this plan has.
            gb_per_s: What one rank sends in one direction, 1e9 byte/s; by default as in this plan.

        Raises:
            ConfigError: As `at` does.
        """
        from fsdp_compile.explain.scale.scaling import scaling

        return scaling(self, world_sizes, gb_per_s)

    def formulas(self) -> Formulas:
        """Bytes and times as formulas of ranks, link, batch and sequence, for the same choices as in this plan."""
        from fsdp_compile.explain.scale.symbolic import formulas

        return formulas(self)

    @property
    def forward(self) -> tuple[GraphPlan, ...]:
        """Forward graphs; more than one after graph breaks."""
        return tuple(graph for graph in self.graphs if graph.phase is Phase.FORWARD)

    @property
    def backward(self) -> tuple[GraphPlan, ...]:
        """Backward graphs; none without gradients."""
        return tuple(graph for graph in self.graphs if graph.phase is Phase.BACKWARD)

    @property
    def step_us(self) -> float:
        """Estimated time of forward and backward."""
        return sum(graph.end_us for graph in self.graphs)

    @property
    def floor_us(self) -> float:
        """What no schedule can beat: all compute, or all communication, whichever takes longer."""
        return max(sum(g.compute_us for g in self.graphs), sum(g.communication_us for g in self.graphs))

    @property
    def peak_bytes(self) -> int:
        """The largest sum of live bytes in any graph."""
        return max((graph.memory.peak_bytes for graph in self.graphs), default=0)

    @property
    def host_bytes(self) -> int:
        """What one rank holds in the memory of the host: offloaded shards and gradients, without optimizer state."""
        return sum(unit.host_bytes for unit in self.units)

    def __str__(self) -> str:
        from fsdp_compile.explain.show.tables import render

        return render(self, width=80)

    def save_html(self, path: str | Path) -> Path:
        """Writes one self-contained page and returns its path."""
        from fsdp_compile.explain.show.page import page

        return _write(path, page(self))

    def save_trace(self, path: str | Path) -> Path:
        """Writes a trace that Perfetto and chrome://tracing open, and returns its path."""
        from fsdp_compile.explain.show.trace_events import trace_events

        return _write(path, json.dumps(trace_events(self)))

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, ready for JSON; units are in the names of the fields."""
        from fsdp_compile.explain.show.page import to_plain

        return to_plain(self)


def _write(path: str | Path, text: str) -> Path:
    target = Path(path)
    target.write_text(text, encoding="utf-8")
    return target
