"""`profile_step`: a step of a compiled model as it was planned and as it ran."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.profiler import profile, record_function

from fsdp_compile._torch.autograd import profiler_runs
from fsdp_compile.cost.hardware import hardware_of
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.lanes import Lane, Side, planned_side
from fsdp_compile.explain.measured_lanes import STEP, measured_side
from fsdp_compile.explain.page import to_plain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.step_drawing import draw
from fsdp_compile.explain.tables import Table, as_text, size, time
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.lower.region import regions_of


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
        return draw(self.title, self.planned, self.measured, Path(path), "png")

    def save_svg(self, path: str | Path) -> Path:
        """Draws the same into an SVG, and returns its path.

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        return draw(self.title, self.planned, self.measured, Path(path), "svg")

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, strings and numbers, ready for JSON; units are in the names of the fields."""
        return to_plain(self)


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
    taken = model_of(plain)
    regions = [] if taken is None else regions_of(taken.units)
    if taken is None or not regions:
        raise ConfigError(
            "the model has not run yet",
            where=f"profile_step({user_class(plain).__name__}, step)",
            instead="two steps of the compiled model first",
        )
    compiled = {unit for unit in taken.units if any(region.steps for region in unit.compiled_regions.values())}
    shares = [unit.title for unit in taken.units if unit.groups and unit not in compiled]
    if shares:
        raise ConfigError(
            f"unit {shares[0]} shares the code of another one, so the graphs that ran are not the whole step",
            where=f"profile_step({user_class(plain).__name__}, step)",
            instead="plan=explain(plain_model, ..., options={'regions': 'blocks'}), of a model that is not sharded",
        )
    return explain(plain, hardware=regions[0].hardware or hardware_of(regions[0].steps[0]))
