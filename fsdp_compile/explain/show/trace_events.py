"""The report in the Trace Event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fsdp_compile.explain.plan_data import PlanData
from fsdp_compile.explain.report import Collective, GraphPlan

_PROCESS: Final = 1
_COMPUTE: Final = 0
_STALLS: Final = 1


def trace_events(plan: PlanData) -> dict[str, Any]:
    """All lanes and the memory curve as events; times in us."""
    lanes = {lane: number for number, lane in enumerate(plan.lanes, start=_STALLS + 1)}
    events = list(_names(plan, lanes))
    offset = 0.0
    for graph in plan.graphs:
        events += _compute(graph, offset)
        for collective in graph.sent:
            events += _collective(collective, lanes[collective.lane], offset)
        events += _memory(graph, offset)
        offset += graph.end_us
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(plan: PlanData, lanes: dict[str, int]) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", _COMPUTE, f"{plan.title} on {plan.world_size} ranks")
    for name, number in {"compute": _COMPUTE, "exposed": _STALLS, **lanes}.items():
        yield _meta("thread_name", number, name)


def _meta(what: str, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": lane, "args": {"name": name}}


def _slice(name: str, lane: int, begin_us: float, end_us: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": _PROCESS, "tid": lane, "ts": begin_us, "dur": end_us - begin_us, "args": args
    }  # fmt: skip


def _compute(graph: GraphPlan, offset: float) -> Iterator[dict[str, Any]]:
    for span in graph.spans:
        args = {"phase": graph.phase.value, "first": span.first, "last": span.last, "flops": span.flops}
        yield _slice(span.where or "compute", _COMPUTE, offset + span.begin_us, offset + span.end_us, args)


def _collective(c: Collective, lane: int, offset: float) -> Iterator[dict[str, Any]]:
    args = {
        "size_bytes": c.size_bytes,
        "sent_bytes": c.sent_bytes,
        "dtype": c.dtype,
        "parameters": list(c.parameters),
        "start": c.start.node,
        "wait": c.wait.node if c.wait is not None else None,
        "exposed_us": c.exposed_us,
        "reason": c.reason,
    }
    name = f"{c.kind.value} {c.unit}"
    yield _slice(name, lane, offset + c.begin_us, offset + c.end_us, args)
    if c.exposed_us > 0:
        yield _slice(f"waits for {name}", _STALLS, offset + c.end_us - c.exposed_us, offset + c.end_us, {})


def _memory(graph: GraphPlan, offset: float) -> Iterator[dict[str, Any]]:
    """One counter event wherever some sum changes; its tracks are stacked."""
    before: tuple[int, ...] = ()
    for time_us, live in zip(graph.memory.time_us, zip(*graph.memory.live_bytes.values(), strict=True), strict=True):
        if live != before:
            named = {holder.value: size for holder, size in zip(graph.memory.live_bytes, live, strict=True)}
            yield {"ph": "C", "name": "live bytes", "pid": _PROCESS, "ts": offset + time_us, "args": named}
            before = live
