"""How long our passes take, and on how many nodes."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.pipeline import transform


@dataclasses.dataclass(frozen=True)
class PassTime:
    """One graph's way through all passes and the verifier.

    Attributes:
        phase: "forward" or "backward".
        nodes: Nodes before.
        seconds: Time.
    """

    phase: str
    nodes: int
    seconds: float


@contextmanager
def timed_passes() -> Iterator[list[PassTime]]:
    """Within it, compiles and `explain` note the time of their passes in the list."""
    times: list[PassTime] = []

    def timed(step: StepGraph, *args: Any, **kwargs: Any) -> StepGraph:
        nodes = len(step.graph.nodes)
        start_s = time.perf_counter()
        transformed = transform(step, *args, **kwargs)
        times.append(PassTime(step.phase.value, nodes, time.perf_counter() - start_s))
        return transformed

    # By name: the package's attribute `explain` is the function.
    backend, trace = (importlib.import_module(f"fsdp_compile.{name}") for name in ("backend", "explain.trace"))
    with mock.patch.object(backend, "transform", timed), mock.patch.object(trace, "transform", timed):
        yield times
