"""What `explain` returns: a plan, with methods that show it and that make others from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_compile.explain.plan_data import PlanData
from fsdp_compile.explain.scale.rescale import rescaled
from fsdp_compile.explain.scale.scaling import Scaling, scaling
from fsdp_compile.explain.scale.symbolic import Formulas, formulas
from fsdp_compile.explain.show.page import page, to_plain
from fsdp_compile.explain.show.tables import render
from fsdp_compile.explain.show.trace_events import trace_events


@dataclasses.dataclass(frozen=True)
class Plan(PlanData):
    """What the passes make of a model; `print` it, save it as a page or a trace, or read it as data."""

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """Adds the methods of a plan to data."""
        return cls(**vars(data))

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
            ConfigError: For a number that is not positive, a model that has run already, other ranks of a mesh of two
                dimensions or of a part of the world, other ranks where blocks are computed again for a budget, or a
                size that was not open or for which the model's graph is another one.
        """
        sizes = {"batch": batch, "sequence": sequence}
        return Plan.of(rescaled(self, world_size=world_size, gb_per_s=gb_per_s, sizes=sizes))

    def scaling(self, world_sizes: Sequence[int], *, gb_per_s: float | None = None) -> Scaling:
        """Times and memory for several numbers of ranks, as rows and to be drawn; the model is not traced again.

        Args:
            world_sizes: Numbers of ranks, each with inputs of the size that this plan has.
            gb_per_s: What one rank sends in one direction, 1e9 byte/s; by default as in this plan.

        Raises:
            ConfigError: As `at` does.
        """
        return scaling(self, world_sizes, gb_per_s)

    def formulas(self) -> Formulas:
        """Bytes and times as formulas of ranks, link, batch and sequence, for the same choices as in this plan."""
        return formulas(self)

    def __str__(self) -> str:
        return render(self, width=80)

    def save_html(self, path: str | Path) -> Path:
        """Writes one self-contained page and returns its path."""
        return _write(path, page(self))

    def save_trace(self, path: str | Path) -> Path:
        """Writes a trace that Perfetto and chrome://tracing open, and returns its path."""
        return _write(path, json.dumps(trace_events(self)))

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, ready for JSON; units are in the names of the fields."""
        return to_plain(self)


def _write(path: str | Path, text: str) -> Path:
    target = Path(path)
    target.write_text(text, encoding="utf-8")
    return target
