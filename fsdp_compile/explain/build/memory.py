"""Reports of memory and of the compute lane."""

from __future__ import annotations

from torch import fx

from fsdp_compile.cost.memory import Buffer, Holder, Memory
from fsdp_compile.cost.timeline import Schedule
from fsdp_compile.explain.report import Allocation, MemoryCurve, Place, Span
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.queries import module_of, unit_of

_LARGEST = 12


def memory_curve(step: StepGraph, memory: Memory, schedule: Schedule) -> MemoryCurve:
    """Live bytes of a graph, its peak, and the memory at the peak."""
    nodes = list(step.graph.nodes)
    time_us = tuple(schedule.timeline.reached_us[node] for node in nodes)
    total = memory.live_bytes()
    at = max(range(len(total)), key=total.__getitem__)
    by_holder = {holder: tuple(memory.live_bytes([holder])) for holder in Holder}
    return MemoryCurve(
        peak_bytes=total[at],
        peak=Place(nodes[at].name, at, module_of(nodes[at]), time_us[at]),
        at_peak={holder: live[at] for holder, live in by_holder.items() if live[at]},
        largest=tuple(_allocation(buffer) for buffer in memory.at(at)[:_LARGEST]),
        time_us=time_us,
        live_bytes={holder: live for holder, live in by_holder.items() if any(live)},
    )


def _allocation(buffer: Buffer) -> Allocation:
    return Allocation(buffer.node.name, module_of(buffer.node), buffer.holder, buffer.size_bytes)


def spans(step: StepGraph, schedule: Schedule, units: frozenset[str]) -> tuple[Span, ...]:
    """The compute lane: consecutive nodes of one unit joined."""
    found: list[Span] = []
    for node in step.graph.nodes:
        cost = schedule.costs[node]
        if not cost.time_us:
            continue
        where = unit_of(module_of(node), units)
        begin = schedule.timeline.reached_us[node]
        last = found[-1] if found else None
        # A node of unknown module belongs to its neighbours.
        if last is not None and (last.where == where or not where) and begin - last.end_us < 1e-6:
            found[-1] = _extended(last, node, begin + cost.time_us, cost.flops)
        else:
            found.append(Span(where, node.name, node.name, begin, begin + cost.time_us, cost.flops))
    return tuple(found)


def _extended(span: Span, node: fx.Node, end_us: float, flops: int) -> Span:
    return Span(span.where, span.first, node.name, span.begin_us, end_us, span.flops + flops)
