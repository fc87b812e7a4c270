"""`profile_step`: a step of a compiled model as it was planned and as it ran.

Both sides say when a rank computes and communicates, and what memory it takes. The measured one comes from a trace of
torch's profiler. On a device with streams, computation and collectives are its kernels. A CPU has none: there it
computes whenever the thread of the step does not wait for a collective, and collectives are what gloo's own threads do.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import operator
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch.profiler import profile, record_function

from fsdp_compile._torch.autograd import profiler_runs
from fsdp_compile.cost.communicate import COPIES, Kind
from fsdp_compile.cost.hardware import hardware_of
from fsdp_compile.errors import ConfigError
from fsdp_compile.explain.api import as_it_ran, explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.skipped import not_compiled
from fsdp_compile.explain.tables import Table, as_text, size, time, to_plain
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.ir.graph import Phase

Stretch = tuple[float, float]
"""Begin and end in us, from the start of the step."""


class Lane(enum.Enum):
    """What a rank does at the same time as something else."""

    COMPUTATION = "computation"
    GATHERS = "all-gathers"
    REDUCTIONS = "reductions"
    OTHER = "other collectives"


@dataclasses.dataclass(frozen=True)
class Side:
    """One step of one rank; times in us from its start.

    Attributes:
        lanes: For each lane when it is busy: stretches that do not overlap, in the order of time.
        memory: Points of a staircase: when memory changes, and by then how many bytes more there are than at the start.
        backward_us: When backward begins; the end of forward if there is none.
        end_us: When backward has ended; what comes later (clipping, the optimizer) is not planned.
    """

    lanes: Mapping[Lane, tuple[Stretch, ...]]
    memory: tuple[tuple[float, int], ...]
    backward_us: float
    end_us: float
    derived: ClassVar = ("busy_us", "exposed_us", "peak_bytes")

    @property
    def busy_us(self) -> Mapping[Lane, float]:
        """How long each lane is busy in forward and backward."""
        return {lane: length_us(clipped(busy, 0.0, self.end_us)) for lane, busy in self.lanes.items()}

    @property
    def exposed_us(self) -> float:
        """How long a collective runs in forward and backward, and no computation."""
        sent = joined(stretch for lane, busy in self.lanes.items() if lane is not Lane.COMPUTATION for stretch in busy)
        idle = gaps(self.lanes[Lane.COMPUTATION], 0.0, self.end_us)
        return sum(length_us(clipped(sent, *gap)) for gap in idle)

    @property
    def peak_bytes(self) -> int:
        """The most that forward and backward have more than there was at the start."""
        return max((held for at_us, held in self.memory if at_us <= self.end_us), default=0)


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """One step of this rank, planned and measured; `print` it, or read it as data.

    Both sides have the same lanes, in us from the start of the step, and memory in bytes more than at its start.

    Attributes:
        title: The model's class, the number of ranks, and the hardware of the plan.
        planned: The estimate: forward and backward.
        measured: What torch's profiler has recorded; the optimizer, if the step runs one, comes after `end_us`.
    """

    title: str
    planned: Side
    measured: Side

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
        The script `docs/examples/profile_step.py` prints the numbers of a step.
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


def planned_side(plan: Plan) -> Side:
    """The estimated timeline and memory of a plan."""
    lanes: dict[Lane, list[Stretch]] = {lane: [] for lane in Lane}
    memory: list[tuple[float, int]] = []
    offset = backward = 0.0
    for graph in plan.graphs:
        lanes[Lane.COMPUTATION] += [(offset + span.begin_us, offset + span.end_us) for span in graph.spans]
        for one in graph.sent:
            if one.kind not in COPIES:
                lanes[_KINDS.get(one.kind, Lane.OTHER)].append((offset + one.begin_us, offset + one.end_us))
        totals = map(sum, zip(*graph.memory.live_bytes.values(), strict=True))
        memory += [(offset + at_us, live) for at_us, live in zip(graph.memory.time_us, totals, strict=True)]
        offset += graph.end_us
        backward = offset if graph.phase is Phase.FORWARD else backward
    at_start = memory[0][1] if memory else 0
    return Side(
        lanes={lane: joined(busy) for lane, busy in lanes.items()},
        memory=tuple((at_us, live - at_start) for at_us, live in memory),
        backward_us=backward,
        end_us=offset,
    )


_KINDS: Final = {Kind.GATHER: Lane.GATHERS, Kind.REDUCE: Lane.REDUCTIONS, Kind.REPLICATE: Lane.REDUCTIONS}

Event = Mapping[str, Any]
"""One event of the Trace Event format, with times in us."""

STEP: Final = "fsdp_compile: the step"
"""The range around the step."""
_BACKWARD: Final = "autograd::engine::evaluate_function"
_WAIT: Final = "_c10d_functional::wait_tensor"
_BY_DEVICE: Final = {"kernel", "gpu_memcpy", "gpu_memset"}
_BY_LAUNCH: Final = {"cuda_runtime", "cuda_driver", "xpu_runtime"}
_COLLECTIVE: Final = re.compile(r"^(?:gloo:|(?:nccl|rccl)\w*?_)(\w+)", flags=re.IGNORECASE)
_CPU: Final = 0
"""Torch's number of this type of device."""


def measured_side(events: Sequence[Event]) -> Side:
    """The step in a trace: that of the range `STEP`."""
    timed = [event for event in events if event.get("ph") == "X"]
    step = next(event for event in timed if event["name"] == STEP)
    start, end = step["ts"], _end(step)
    kernels = [event for event in timed if event.get("cat") in _BY_DEVICE]
    backward = [event for event in timed if event["name"].startswith(_BACKWARD) and start <= event["ts"] <= end]
    begins, ends = min((event["ts"] for event in backward), default=end), max(map(_end, backward), default=end)
    lanes: dict[Lane, list[Stretch]] = {lane: [] for lane in Lane}
    if kernels:
        launches = [event for event in timed if event.get("cat") in _BY_LAUNCH]
        launched: dict[Any, float] = {each.get("args", {}).get("correlation"): each["ts"] for each in launches}
        # Kernels run later than the host launches them.
        by_launch = [(launched.get(each.get("args", {}).get("correlation")) or each["ts"], each) for each in kernels]
        of_backward = [kernel["ts"] for at, kernel in by_launch if begins <= at <= ends]
        ends = max((_end(kernel) for at, kernel in by_launch if at <= ends), default=ends)
        begins = min(of_backward, default=begins)
        for kernel in kernels:
            lanes[_lane(kernel["name"]) or Lane.COMPUTATION].append((kernel["ts"], _end(kernel)))
    else:
        waits = joined((e["ts"], _end(e)) for e in timed if e["name"] == _WAIT and e["tid"] == step["tid"])
        lanes[Lane.COMPUTATION] += gaps(waits, start, end)
        for event in timed:
            if (lane := _lane(event["name"])) is not None:
                lanes[lane].append((event["ts"], _end(event)))
    return Side(
        lanes={lane: tuple((b - start, e - start) for b, e in joined(busy)) for lane, busy in lanes.items()},
        memory=_memory(events, start, end, on_device=bool(kernels)),
        backward_us=begins - start,
        end_us=ends - start,
    )


def _lane(name: str) -> Lane | None:
    """The lane of a collective; `None` for what is none."""
    found = _COLLECTIVE.match(name)
    if found is None:
        return None
    what = found[1].lower().replace("_", "")
    if what.startswith("allgather"):
        return Lane.GATHERS
    return Lane.REDUCTIONS if what.startswith(("reducescatter", "allreduce")) else Lane.OTHER


def _memory(events: Sequence[Event], start: float, end: float, *, on_device: bool) -> tuple[tuple[float, int], ...]:
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and (event["args"]["Device Type"] != _CPU) is on_device
    ]
    points, held = [(0.0, 0)], 0
    for at, change in sorted(changes, key=operator.itemgetter(0)):
        if start <= at <= end:
            held += change
            points.append((at - start, held))
    return tuple(points)


def _end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def joined(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """The same time in stretches that neither overlap nor touch."""
    found: list[Stretch] = []
    for begin, end in sorted(stretches):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return tuple(found)


def gaps(stretches: Sequence[Stretch], begin: float, end: float) -> Iterator[Stretch]:
    """The time from begin to end that joined stretches leave free."""
    inside = list(clipped(stretches, begin, end))
    edges = [begin, *itertools.chain.from_iterable(inside), end]
    yield from (gap for gap in zip(edges[::2], edges[1::2], strict=True) if gap[0] < gap[1])


def clipped(stretches: Iterable[Stretch], begin: float, end: float) -> Iterator[Stretch]:
    """The parts of stretches from begin to end."""
    for first, last in stretches:
        if first < end and last > begin:
            yield max(first, begin), min(last, end)


def length_us(stretches: Iterable[Stretch]) -> float:
    """Their time together."""
    return sum(end - begin for begin, end in stretches)
