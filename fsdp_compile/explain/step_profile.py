"""`profile_step`: a step of a compiled model as it was planned and as it ran, as numbers and as a picture."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.profiler import profile, record_function

from fsdp_compile._torch.autograd import profiler_runs
from fsdp_compile.cost.hardware import hardware_of
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.api import as_it_ran, explain
from fsdp_compile.explain.lanes import STEP, Lane, Side, clipped, measured_side, planned_side
from fsdp_compile.explain.page import to_plain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.skipped import not_compiled
from fsdp_compile.explain.tables import Table, as_text, size, time
from fsdp_compile.fsdp2.module_class import user_class


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """One step of this rank, planned and measured; `print` it, draw it, or read it as data.

    Both sides have the same lanes, in us from the start of the step, and memory in bytes more than at its start.

    Attributes:
        title: The model's class, the number of ranks, and the hardware of the plan.
        planned: The estimate: forward and backward.
        measured: What torch's profiler has recorded; the optimizer, if the step runs one, comes after `end_us`.
    """

    title: str
    planned: Side
    measured: Side
    derived: ClassVar = ()

    def __str__(self) -> str:
        return as_text([self.table().text()], width=80)

    def table(self) -> Table:
        """Times and peak memory of forward and backward, planned and measured."""
        sides = (self.planned, self.measured)
        rows = [
            ("forward", *(time(side.backward_us) for side in sides)),
            ("backward", *(time(side.end_us - side.backward_us) for side in sides)),
            *((lane.value, *(time(side.busy_us[lane]) for side in sides)) for lane in Lane),
            ("exposed communication", *(time(side.exposed_us) for side in sides)),
            ("peak memory over the start", *(size(side.peak_bytes) for side in sides)),
        ]
        return Table(self.title, ("", "planned ", "measured "), rows)

    def save_png(self, path: str | Path) -> Path:
        """Draws both timelines and memory curves into a PNG, and returns its path.

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        return _draw(self, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, ready for JSON; units are in the names of the fields."""
        return to_plain(self)


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


def _draw(profiled: StepProfile, path: Path) -> Path:
    """Lanes above memory, the planned side on the left; times in ms, memory in MB (1e6 bytes)."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "a picture takes matplotlib, which is not installed",
            where=f"StepProfile.save_png({str(path)!r})",
            instead="pip install 'fsdp-compile[plot]', or the numbers as data",
        )
    # The object interface draws without a display and without global state.
    from matplotlib.figure import Figure

    planned, measured = profiled.planned, profiled.measured
    figure: Any = Figure(figsize=(13, 6), layout="constrained")
    figure.suptitle(profiled.title)
    lanes = [lane for lane in Lane if planned.lanes[lane] or measured.lanes[lane]]
    columns = figure.subplots(2, 2, sharex="col", sharey="row").T
    ends = [_last_us(planned), _last_us(measured)]
    if max(ends) <= _COMPARABLE * min(ends):
        ends = [max(ends)] * 2
    sides = (("planned", planned), ("measured", measured))
    for (top, bottom), (name, side), end_us in zip(columns, sides, ends, strict=True):
        _draw_lanes(top, side, lanes)
        exposed = f"exposed {side.exposed_us / 1e3:.1f} ms, peak {side.peak_bytes / 1e6:.1f} MB"
        top.set_title(f"{name}: {side.end_us / 1e3:.1f} ms, {exposed}", loc="left", fontsize=10)
        times, held = zip(*((at_us / 1e3, held / 1e6) for at_us, held in side.memory), strict=True)
        bottom.fill_between(times, held, step="post", alpha=0.25, color="#475467", linewidth=0)
        bottom.step(times, held, where="post", linewidth=1, color="#475467")
        bottom.set(xlabel="time (ms)", xlim=(0, 1.02 * end_us / 1e3))
        bottom.grid(visible=True, alpha=0.3)
    columns[0][1].set_ylabel("memory over the start (MB)")
    figure.savefig(path, dpi=150, format="png")
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


def profile_step(model: Any, step: Callable[[], object], *, plan: Plan | None = None) -> StepProfile:
    """Runs one step under torch's profiler, and compares it with its plan.

    A step has collectives, so every rank calls this; each gets its own measurement. The profiler makes a step slower.

    Args:
        model: A compiled `nn.Module` that has run two steps or more: nothing is compiled while the profiler runs.
        step: Runs one forward and backward, and whatever else you want to see, such as the optimizer.
        plan: By default that of the graphs that ran, for the hardware that they were planned for. For a model that is
            compiled block by block, `explain(plain_model, ..., options={"regions": "blocks"})`.

    Raises:
        ConfigError: If the model has not run; if blocks share code and no plan is given; if a profiler already runs.

    Example:
        The script `docs/examples/profile_step.py` draws a step into a PNG.
    """
    plan = _plan_of(model) if plan is None else plan
    if profiler_runs():
        raise ConfigError("a profiler runs already", where="profile_step(model, step)", instead="a call outside of it")
    device = next(model.parameters()).device
    synchronize: Callable[[], object] = (
        torch.get_device_module(device.type).synchronize if device.type != "cpu" else lambda: None
    )
    synchronize()
    with profile(profile_memory=True) as profiler, record_function(STEP):
        step()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    title = f"{plan.title} on {plan.world_size} ranks, planned for {plan.hardware.device.name}, {plan.links}"
    return StepProfile(title, planned_side(plan), measured_side(events))


def _plan_of(model: nn.Module) -> Plan:
    """The plan of the graphs that ran, for the hardware that they were planned for."""
    plain = getattr(model, "_orig_mod", model)
    where = f"profile_step({user_class(plain).__name__}, step)"
    taken, regions = as_it_ran(plain, where)
    if shares := not_compiled(taken.units):
        raise ConfigError(
            f"unit {shares[0]} shares the code of another one, so the graphs that ran are not the whole step",
            where=where,
            instead="plan=explain(plain_model, ..., options={'regions': 'blocks'}), of a model that is not sharded",
        )
    return explain(plain, hardware=regions[0].hardware or hardware_of(regions[0].steps[0]))
