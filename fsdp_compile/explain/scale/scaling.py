"""How a step grows with the number of ranks: plans of one trace, as rows and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.plan_data import PlanData
from fsdp_compile.explain.scale.rescale import rescaled


@dataclasses.dataclass(frozen=True)
class ScalingRow:
    """What a plan says for one number of ranks; times in us, sizes in byte.

    Attributes:
        step_us: Forward and backward.
        compute_us: Computing alone.
        communication_us: Time of the busiest link lane.
        exposed_us: How long compute stands still.
        busy_us: The larger of compute and communication.
        bound_us: What no schedule can beat in the same memory.
        peak_bytes: The largest sum of live bytes.
        shard_bytes: Sharded parameters of one rank.
    """

    world_size: int
    step_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    busy_us: float
    bound_us: float
    peak_bytes: int
    shard_bytes: int
    sent_bytes: float

    @property
    def efficiency(self) -> float:
        """Compute over step: 1 if no rank ever waits."""
        return self.compute_us / self.step_us if self.step_us else 1.0


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Rows in the order in which ranks were given, each rank with inputs of the same size."""

    title: str
    link: str
    rows: tuple[ScalingRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, ready for JSON."""
        rows = [{**dataclasses.asdict(row), "efficiency": row.efficiency} for row in self.rows]
        return {"title": self.title, "link": self.link, "rows": rows}

    def save_png(self, path: str | Path) -> Path:
        """Draws step time and memory over ranks into a PNG, and returns its path.

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        return self._draw(Path(path), "png")

    def save_svg(self, path: str | Path) -> Path:
        """Draws the same into an SVG, and returns its path.

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        return self._draw(Path(path), "svg")

    def _draw(self, path: Path, kind: str) -> Path:
        if find_spec("matplotlib") is None:
            raise ConfigError(
                "a picture takes matplotlib, which is not installed",
                where=f"Scaling.save_{kind}({str(path)!r})",
                instead="pip install 'fsdp-compile[plot]', or Scaling.rows, the numbers",
            )
        # The object interface draws without a display and without global state.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        figure.suptitle(f"{self.title}, {self.link}: estimates")
        ranks = [row.world_size for row in self.rows]
        times = figure.add_subplot(1, 2, 1, xlabel="ranks", ylabel="time of a step (ms)", xscale="log", yscale="log")
        times.plot(ranks, [row.step_us / 1e3 for row in self.rows], marker="o", label="step")
        times.plot(ranks, [row.bound_us / 1e3 for row in self.rows], linestyle="--", label="lower bound")
        times.plot(ranks, [row.compute_us / 1e3 for row in self.rows], linestyle=":", label="compute")
        times.plot(ranks, [row.communication_us / 1e3 for row in self.rows], linestyle="-.", label="on the link")
        memory = figure.add_subplot(1, 2, 2, xlabel="ranks", ylabel="memory of a rank (GB)", xscale="log")
        memory.plot(ranks, [row.peak_bytes / 1e9 for row in self.rows], marker="o", label="peak")
        memory.plot(ranks, [row.shard_bytes / 1e9 for row in self.rows], linestyle="--", label="sharded parameters")
        memory.set_ylim(bottom=0)
        for axes in (times, memory):
            axes.set_xticks(ranks, [str(number) for number in ranks])
            axes.minorticks_off()
            axes.grid(visible=True, alpha=0.3)
            axes.legend()
        figure.savefig(path, dpi=150, format=kind)
        return path


def scaling(plan: PlanData, world_sizes: Sequence[int], gb_per_s: float | None) -> Scaling:
    """See `Plan.scaling`."""
    if not world_sizes:
        raise ConfigError("no number of ranks is given", where="Plan.scaling(world_sizes=[])", instead="[8, 64, 512]")
    plans = [rescaled(plan, world_size=ranks, gb_per_s=gb_per_s, sizes={}) for ranks in world_sizes]
    return Scaling(plan.title, plans[0].hardware.links, tuple(map(_row, plans)))


def _row(plan: PlanData) -> ScalingRow:
    return ScalingRow(
        world_size=plan.world_size,
        step_us=plan.step_us,
        compute_us=sum(graph.compute_us for graph in plan.graphs),
        communication_us=sum(graph.communication_us for graph in plan.graphs),
        exposed_us=sum(graph.exposed_us for graph in plan.graphs),
        busy_us=plan.busy_us,
        bound_us=plan.bound.time_us,
        peak_bytes=plan.peak_bytes,
        shard_bytes=sum(unit.shard_bytes for unit in plan.units),
        sent_bytes=plan.volume.total_bytes,
    )
