"""How a step grows with the number of ranks: plans of one trace, as rows and as a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_compile.explain.figures import new_figure

if TYPE_CHECKING:
    from fsdp_compile.explain.plan import Plan

_SHOWN = (
    "world_size", "step_us", "compute_us", "communication_us", "exposed_us", "busy_us", "peak_bytes", "shard_bytes",
    "efficiency",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Plans in the order in which numbers of ranks were given, each rank with inputs of the same size."""

    rows: tuple[Plan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: of each plan its times in us, its sizes in byte, and compute over step."""
        rows = [
            {name: getattr(plan, name) for name in _SHOWN} | {"sent_bytes": plan.volume.total_bytes}
            for plan in self.rows
        ]
        return {"title": self.rows[0].title, "link": self.rows[0].hardware.links, "rows": rows}

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
        figure = new_figure(f"Scaling.save_{kind}({str(path)!r})", (10, 4))
        figure.suptitle(f"{self.rows[0].title}, {self.rows[0].hardware.links}: estimates")
        ranks = [plan.world_size for plan in self.rows]
        times = figure.add_subplot(1, 2, 1, xlabel="ranks", ylabel="time of a step (ms)", xscale="log", yscale="log")
        times.plot(ranks, [plan.step_us / 1e3 for plan in self.rows], marker="o", label="step")
        times.plot(ranks, [plan.compute_us / 1e3 for plan in self.rows], linestyle=":", label="compute")
        times.plot(ranks, [plan.communication_us / 1e3 for plan in self.rows], linestyle="-.", label="on the link")
        memory = figure.add_subplot(1, 2, 2, xlabel="ranks", ylabel="memory of a rank (GB)", xscale="log")
        memory.plot(ranks, [plan.peak_bytes / 1e9 for plan in self.rows], marker="o", label="peak")
        memory.plot(ranks, [plan.shard_bytes / 1e9 for plan in self.rows], linestyle="--", label="sharded parameters")
        memory.set_ylim(bottom=0)
        for axes in (times, memory):
            axes.set_xticks(ranks, [str(number) for number in ranks])
            axes.minorticks_off()
            axes.grid(visible=True, alpha=0.3)
            axes.legend()
        figure.savefig(path, dpi=150, format=kind)
        return path
