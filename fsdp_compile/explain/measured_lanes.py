"""What a trace of torch's profiler says of one step: when it computed, gathered and reduced, and what memory it took.

On a device with streams, computation and collectives are its kernels. A CPU has none: there it computes whenever the
thread of the step does not wait for a collective, and collectives are what gloo's own threads do.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fsdp_compile.explain.lanes import Lane, Side, Stretch, gaps, joined

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
        by_launch: dict[int, float] = {}
        for kernel in kernels:
            by_launch[id(kernel)] = launched.get(_correlation(kernel)) or kernel["ts"]
        # Kernels run later than the host launches them.
        of_backward = [kernel for kernel in kernels if begins <= by_launch[id(kernel)] <= ends]
        before_end = [kernel for kernel in kernels if by_launch[id(kernel)] <= ends]
        begins = min((kernel["ts"] for kernel in of_backward), default=begins)
        ends = max(map(_end, before_end), default=ends)
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
