"""Measures runs of compiled graphs: when they start collectives, and how long they wait for each.

The code that runs is the same, and so are its results: a dispatch mode sees the calls of communication. Times are those
of the host on a CPU, and events on the current stream on a GPU, which nothing waits for meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_compile._torch.tensors import OpOverload, TorchDispatchMode
from fsdp_compile.passes.planned_times import COLLECTIVES, is_wait
from fsdp_compile.planner.measured_times import Mark, Run

Moment = float | torch.Event
"""A time of the host in us, or an event of a stream."""


class Recording(TorchDispatchMode):
    """Notes each call of communication while it is entered; runs one graph.

    Args:
        device_type: Of the device that computes.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._now: Callable[[], Moment] = _host_us if device_type == "cpu" else lambda: _event(device_type)
        self._calls: list[tuple[bool, Moment, Moment]] = []
        self._begin: Moment = 0.0
        self._end: Moment = 0.0

    def __torch_dispatch__(
        self, func: OpOverload, _types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != COLLECTIVES:
            return func(*args, **(kwargs or {}))
        begin = self._now()
        result = func(*args, **(kwargs or {}))
        self._calls.append((is_wait(func), begin, self._now()))
        return result

    def of(self, compiled: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Runs a compiled graph, and returns what it returns."""
        self._begin = self._now()
        with self:
            result = compiled(args)
        self._end = self._now()
        return result

    def run(self) -> Run:
        """What was noted; waits for the device."""
        if isinstance(self._end, torch.Event):
            self._end.synchronize()
        marks = tuple(Mark(waits, self._us(begin), self._us(end)) for waits, begin, end in self._calls)
        return Run(Mark(waits=False, begin_us=0.0, end_us=self._us(self._end)), marks)

    def _us(self, moment: Moment) -> float:
        if isinstance(moment, torch.Event):
            assert isinstance(self._begin, torch.Event)
            return 1e3 * self._begin.elapsed_time(moment)
        assert not isinstance(self._begin, torch.Event)
        return moment - self._begin


def _host_us() -> float:
    return 1e6 * time.perf_counter()


def _event(device_type: str) -> torch.Event:
    event = torch.Event(device_type, enable_timing=True)
    event.record()
    return event
