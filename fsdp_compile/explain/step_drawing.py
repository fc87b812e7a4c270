"""The picture of a step: the planned one on the left and the measured one on the right, lanes above memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from fsdp_compile.explain.figures import new_figure
from fsdp_compile.explain.lanes import Lane, Side, clipped

_COLOURS: Final = {
    Lane.COMPUTATION: "#3a923a",
    Lane.GATHERS: "#2b7bba",
    Lane.REDUCTIONS: "#c2571a",
    Lane.OTHER: "#7d5ba6",
}
_LATER: Final = "#bbbbbb"
_BAR: Final = 0.8
_COMPARABLE: Final = 4.0
"""Steps have one scale of time while neither is longer than so many of the other one."""


def draw(title: str, planned: Side, measured: Side, path: Path, kind: str) -> Path:
    """Draws both sides into a file of a kind that matplotlib writes; times in ms, memory in MB (1e6 bytes).

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    figure = new_figure(f"StepProfile.save_{kind}({str(path)!r})", (13, 6))
    figure.suptitle(title)
    lanes = [lane for lane in Lane if planned.lanes[lane] or measured.lanes[lane]]
    columns = figure.subplots(2, 2, sharex="col", sharey="row").T
    ends = [_last_us(planned), _last_us(measured)]
    if max(ends) <= _COMPARABLE * min(ends):
        ends = [max(ends)] * 2
    for (top, bottom), side, name, end_us in zip(
        columns, (planned, measured), ("planned", "measured"), ends, strict=True
    ):
        _draw_lanes(top, side, lanes)
        exposed = f"exposed {side.exposed_us / 1e3:.1f} ms, peak {side.peak_bytes / 1e6:.1f} MB"
        top.set_title(f"{name}: {side.end_us / 1e3:.1f} ms, {exposed}", loc="left", fontsize=10)
        times, held = zip(*((at_us / 1e3, held / 1e6) for at_us, held in side.memory), strict=True)
        bottom.fill_between(times, held, step="post", alpha=0.25, color="#475467", linewidth=0)
        bottom.step(times, held, where="post", linewidth=1, color="#475467")
        bottom.set(xlabel="time (ms)", xlim=(0, 1.02 * end_us / 1e3))
        bottom.grid(visible=True, alpha=0.3)
    columns[0][1].set_ylabel("memory over the start (MB)")
    figure.savefig(path, dpi=150, format=kind)
    return path


def _draw_lanes(axes: Any, side: Side, lanes: list[Lane]) -> None:
    for row, lane in enumerate(lanes):
        for begin, end, colour in ((0.0, side.end_us, _COLOURS[lane]), (side.end_us, float("inf"), _LATER)):
            bars = [(first / 1e3, (last - first) / 1e3) for first, last in clipped(side.lanes[lane], begin, end)]
            axes.broken_barh(bars, (row - _BAR / 2, _BAR), facecolors=colour)
    for at_us, name in ((side.backward_us, "backward"), (side.end_us, "later")):
        if at_us < _last_us(side):
            axes.axvline(at_us / 1e3, color="#222222", linewidth=0.8, linestyle=":")
            axes.text(at_us / 1e3, -0.55, f" {name}", fontsize=8, verticalalignment="bottom")
    axes.set_yticks(range(len(lanes)), [lane.value for lane in lanes])
    axes.set_ylim(len(lanes) - 0.4, -1.0)


def _last_us(side: Side) -> float:
    return max(side.end_us, *(end for busy in side.lanes.values() for _, end in busy))
