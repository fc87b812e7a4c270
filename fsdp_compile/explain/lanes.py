"""One side of a step, planned or measured: when it computes and communicates, and what memory it takes.

The measured side comes from a trace of torch's profiler. On a device with streams, computation and collectives are its
kernels. A CPU has none: there it computes whenever the thread of the step does not wait for a collective, and
collectives are what gloo's own threads do.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fsdp_compile.cost.communicate import COPIES, Kind
from fsdp_compile.ir.graph import Phase

if TYPE_CHECKING:
    from fsdp_compile.explain.plan import Plan

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
        launched: dict[Any, float] = {_correlation(each): each["ts"] for each in timed if each.get("cat") in _BY_LAUNCH}
        # Kernels run later than the host launches them.
        by_launch = [(launched.get(_correlation(kernel)) or kernel["ts"], kernel) for kernel in kernels]
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


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")


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
