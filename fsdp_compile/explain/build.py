"""From transformed graphs to a plan: collectives, copies and their messages, memory, and the compute lane."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from torch import fx, nn

from fsdp_compile.cost.communicate import COPIES, Communication, Kind
from fsdp_compile.cost.copies import Copy, copies_of
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import Hardware, Link, Port, Quantity
from fsdp_compile.cost.memory import Holder, Memory, memory_of_step
from fsdp_compile.cost.sizes import result_bytes, tensors_of
from fsdp_compile.cost.timeline import Schedule, Times, schedule, waited_for
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.report import (
    Allocation,
    Collective,
    Exposure,
    GraphPlan,
    MemoryCurve,
    Message,
    Number,
    Place,
    Span,
)
from fsdp_compile.explain.skipped import skipped
from fsdp_compile.explain.tables import time
from fsdp_compile.explain.units import UnitData, reads_of, unit_plan, volume
from fsdp_compile.fsdp2.module_class import user_class
from fsdp_compile.ir.graph import ITEMS, Phase, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import aliases, module_of, unit_of

_LARGEST: Final = 12
"""Pieces of memory that are listed of a peak."""
_NEGLIGIBLE_US: Final = 1.0
_NEGLIGIBLE_SHARE: Final = 0.01


def build_plan(
    model: nn.Module,
    units: Sequence[UnitData],
    regions: Sequence[Sequence[StepGraph]],
    *,
    world_size: int,
    hardware: Hardware,
    fusion: Fusion,
) -> Plan:
    """Reports on all graphs of a sharded model: of each region its forward and, when training, its backward."""
    titles = frozenset(unit.title for unit in units)
    kernels = {step.graph: plan_kernels(step.graph, fusion) for steps in regions for step in steps}
    memories = memory_of_step(regions, lambda step: kernels[step.graph])
    made = []
    for number, (steps, held) in enumerate(zip(regions, memories, strict=True)):
        for step, memory in zip(steps, held, strict=True):
            report = _Report(step, schedule(step, hardware, kernels[step.graph]))
            made.append(report.plan(number, memory, titles, tuple(copies_of(step, kernels[step.graph]))))
    forwards = [plan for plan in made if plan.phase is Phase.FORWARD]
    # Backward runs the regions in the opposite order.
    graphs = [*forwards, *reversed([plan for plan in made if plan.phase is Phase.BACKWARD])]
    read = reads_of(regions)
    return Plan(
        title=user_class(model).__name__,
        world_size=world_size,
        hardware=hardware,
        units=tuple(unit_plan(unit, read, training=len(graphs) > len(forwards)) for unit in units),
        graphs=tuple(graphs),
        volume=volume(graphs, units, read),
        skipped=tuple(skipped(model, units, graphs)),
        numbers=tuple(_numbers(hardware, [c for graph in graphs for c in graph.sent])),
    )


class _Report:
    """The report of one graph."""

    def __init__(self, step: StepGraph, scheduled: Schedule) -> None:
        self.step = step
        self.nodes = list(step.graph.nodes)
        self.order = step.order()
        self.scheduled = scheduled
        self.waits: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            if (start := waited_for(node)) is not None:
                self.waits.setdefault(start, []).append(node)

    def plan(self, region: int, memory: Memory, titles: frozenset[str], copies: tuple[Copy, ...]) -> GraphPlan:
        """All of it."""
        timeline = self.scheduled.timeline
        collectives = (
            self._collective(start, sent, ", ".join(require(start).units), tuple(_messages(start, sent)))
            for start, sent in self.scheduled.communications.items()
        )
        own = (self._collective(start, sent, module_of(start), ()) for start, sent in self.scheduled.own.items())
        return GraphPlan(
            phase=self.step.phase,
            region=region,
            nodes=len(self.nodes),
            flops=sum(cost.flops for cost in self.scheduled.costs.values()),
            compute_us=timeline.compute_us,
            communication_us=max(timeline.busy_us.values(), default=0.0),
            exposed_us=timeline.exposed_us,
            end_us=timeline.end_us,
            collectives=tuple(collectives),
            memory=self._memory(memory),
            spans=self._spans(titles),
            copies=copies,
            own=tuple(own),
        )

    def _place(self, node: fx.Node) -> Place:
        return Place(node.name, self.order[node], module_of(node), self.scheduled.timeline.reached_us[node])

    def _collective(self, start: fx.Node, sent: Communication, unit: str, messages: tuple[Message, ...]) -> Collective:
        """One collective, or one copy."""
        waits = self.waits.get(start, [])
        transfer = self.scheduled.timeline.transfers[start]
        exposure, reason = _exposure(transfer)
        last_use = reshard = None
        # Results of the program's own collectives are in memory as any other value.
        if role_of(start) is Role.GATHER:
            users = {user for node in aliases(waits) for user in node.users}
            reshards = {user for user in users if role_of(user) is Role.RESHARD}
            last_use, reshard = (
                self._place(max(found, key=self.order.__getitem__)) if found else None
                for found in (users - reshards, reshards)
            )
        return Collective(
            **vars(sent),
            **{field.name: getattr(transfer, field.name) for field in dataclasses.fields(Times)},
            unit=unit,
            messages=messages,
            dtype=str(tensors_of(waits[0] if waits else start)[0].dtype).removeprefix("torch."),
            start=self._place(start),
            wait=self._place(waits[0]) if waits else None,
            last_use=last_use,
            reshard=reshard,
            exposure=exposure,
            reason=reason,
        )

    def _memory(self, memory: Memory) -> MemoryCurve:
        """Live bytes, their peak, and the memory at the peak."""
        total = memory.live_bytes()
        at = max(range(len(total)), key=total.__getitem__)
        by_holder = {holder: tuple(memory.live_bytes([holder])) for holder in Holder}
        return MemoryCurve(
            peak_bytes=total[at],
            peak=self._place(self.nodes[at]),
            at_peak={holder: live[at] for holder, live in by_holder.items() if live[at]},
            largest=tuple(
                Allocation(buffer.node.name, module_of(buffer.node), buffer.holder, buffer.size_bytes)
                for buffer in memory.at(at)[:_LARGEST]
            ),
            time_us=tuple(self.scheduled.timeline.reached_us[node] for node in self.nodes),
            live_bytes={holder: live for holder, live in by_holder.items() if any(live)},
        )

    def _spans(self, titles: frozenset[str]) -> tuple[Span, ...]:
        """The compute lane: consecutive nodes of one unit joined."""
        found: list[Span] = []
        for node in self.nodes:
            cost = self.scheduled.costs[node]
            if not cost.time_us:
                continue
            where = unit_of(module_of(node), titles)
            begin = self.scheduled.timeline.reached_us[node]
            made = Span(where, node.name, node.name, begin, begin + cost.time_us, cost.flops)
            last = found[-1] if found else None
            # A node of unknown module belongs to its neighbours.
            if last is not None and (last.where == where or not where) and begin - last.end_us < 1e-6:
                flops = last.flops + cost.flops
                found[-1] = dataclasses.replace(last, last=made.last, end_us=made.end_us, flops=flops)
            else:
                found.append(made)
        return tuple(found)


def _messages(start: fx.Node, sent: Communication) -> Iterator[Message]:
    # A reduce-scatter returns this rank's part of the message, the others all of it.
    ranks = sent.ranks if sent.kind is Kind.REDUCE else 1
    for item in [user for user in start.users if role_of(user) in ITEMS] or [start]:
        yield Message(require(item).parameters, result_bytes(item) * ranks)


def _exposure(transfer: Times) -> tuple[Exposure, str]:
    needed_us = transfer.end_us - transfer.begin_us
    if transfer.exposed_us < _NEGLIGIBLE_US:
        return Exposure.HIDDEN, f"behind {time(transfer.computed_us)}"
    if transfer.computed_us < _NEGLIGIBLE_SHARE * needed_us:
        return Exposure.NO_COMPUTE, "no compute meanwhile"
    if transfer.computed_us >= needed_us:
        return Exposure.QUEUED, f"queued {time(transfer.queued_us)}"
    return Exposure.TOO_SHORT, f"compute only {time(transfer.computed_us)}"


_RATES: Final = {
    Port.GROUP: "rate of each rank",
    Port.RANK: "rate of the port that a rank has",
    Port.HOST: "rate of the port that a host has",
}


def _numbers(hardware: Hardware, sent: Sequence[Collective]) -> Iterator[Number]:
    """What times are estimated with: numbers of the device, and of each link that something is sent on."""
    device = hardware.device
    peaks: dict[Quantity, list[str]] = {}
    for dtype in device.matmul:
        peaks.setdefault(device.matmul_peak(dtype), []).append(str(dtype).removeprefix("torch."))
    for peak, dtypes in peaks.items():
        yield _number(device.name, f"matmul of {', '.join(dtypes)}", peak)
    yield _number(device.name, "share of that", device.matmul_share)
    yield _number(device.name, "memory rate", device.memory_rate)
    yield _number(device.name, "share of that", device.memory_share)
    yield _number(device.name, "memory", device.memory)
    links = (device.near, hardware.link, device.host)
    for link in {link.name: link for link in links}.values():
        yield from _of_link(link, [c for c in sent if c.link == link.name])


def _number(of: str, what: str, quantity: Quantity) -> Number:
    return Number(**vars(quantity), of=of, what=what)


def _of_link(link: Link, sent: Sequence[Collective]) -> Iterator[Number]:
    if not sent:
        return
    yield _number(link.name, _RATES[link.port], link.rate)
    yield _number(link.name, "share of that", link.rate_share)
    rings = dict.fromkeys((c.ranks, c.bytes_per_s) for c in sent if c.kind not in COPIES)
    for ranks, bytes_per_s in rings if link.port is not Port.GROUP else ():
        ports = f"{bytes_per_s / link.bytes_per_s:.3g} such ports at once"
        yield Number(bytes_per_s, "byte/s", ports, link.name, f"ring of {ranks} ranks")
    yield _number(link.name, "launch", link.launch)
    yield _number(link.name, "per doubling of ranks", link.hop)
    for table in link.measured:
        if table.ranks in {ranks for ranks, _ in rings}:
            what = f"{table.kind} over {table.ranks} ranks"
            yield Number(len(table.points), "sizes", link.rate.source, link.name, what)
