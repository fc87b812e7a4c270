"""Reports of collectives, and of copies between host and device: messages, places, and whether compute waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from fsdp_compile.cost.communicate import Communication, Kind
from fsdp_compile.cost.own_collectives import own_start_of
from fsdp_compile.cost.sizes import tensor_bytes, tensors_of
from fsdp_compile.cost.timeline import Schedule, Transfer, waits_of
from fsdp_compile.explain.report import Collective, Exposure, Layout, Message, Place
from fsdp_compile.explain.show.tables import time
from fsdp_compile.ir.graph import Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import aliases, module_of

_ITEMS = (Role.GATHER_ITEM, Role.REDUCE_ITEM, Role.REPLICATE_ITEM)
_NEGLIGIBLE_US = 1.0
_NEGLIGIBLE_SHARE = 0.01


def collectives(step: StepGraph, schedule: Schedule) -> Iterator[Collective]:
    """Reports every collective and every copy of ours in a graph, in the order in which they start."""
    report = _Report(step, schedule)
    for start, communication in schedule.communications.items():
        waits = sorted(waits_of(start), key=report.order.__getitem__)
        ends = _end_of_life(waits, report.order) if communication.kind is Kind.GATHER else (None, None)
        unit, messages = ", ".join(require(start).units), tuple(_messages(start, communication))
        yield report.collective(start, communication, waits, unit=unit, messages=messages, ends=ends)


def own_collectives(step: StepGraph, schedule: Schedule) -> Iterator[Collective]:
    """The same of the program's own collectives."""
    report = _Report(step, schedule)
    waits: dict[fx.Node, list[fx.Node]] = {start: [] for start in schedule.own}
    for node in step.graph.nodes:
        if (start := own_start_of(node)) is not None:
            waits[start].append(node)
    for start, communication in schedule.own.items():
        yield report.collective(start, communication, waits[start], unit=module_of(start), messages=(), ends=_UNKNOWN)


_UNKNOWN = (None, None)
"""Last use and reshard of what is in memory as any other value."""


class _Report:
    def __init__(self, step: StepGraph, schedule: Schedule) -> None:
        self.order = step.order()
        self.timeline = schedule.timeline

    def collective(
        self,
        start: fx.Node,
        communication: Communication,
        waits: Sequence[fx.Node],
        *,
        unit: str,
        messages: tuple[Message, ...],
        ends: tuple[fx.Node | None, fx.Node | None],
    ) -> Collective:
        """One collective; `waits` in graph order, `ends` its last use and its reshard."""
        transfer = self.timeline.transfers[start]
        last_use, reshard = map(self._place, ends)
        exposure, reason = _exposure(transfer)
        place = self._place(start)
        assert place is not None
        return Collective(
            kind=communication.kind,
            unit=unit,
            messages=messages,
            dtype=str(tensors_of(waits[0] if waits else start)[0].dtype).removeprefix("torch."),
            group=communication.group,
            ranks=communication.ranks,
            link=communication.sent_on,
            bytes_per_s=communication.bytes_per_s,
            size_bytes=communication.size_bytes,
            sent_bytes=communication.sent_bytes,
            start=place,
            wait=self._place(waits[0] if waits else None),
            last_use=last_use,
            reshard=reshard,
            issued_us=transfer.issued_us,
            begin_us=transfer.begin_us,
            end_us=transfer.end_us,
            computed_us=transfer.computed_us,
            exposed_us=transfer.exposed_us,
            exposure=exposure,
            reason=reason,
        )

    def _place(self, node: fx.Node | None) -> Place | None:
        if node is None:
            return None
        return Place(node.name, self.order[node], module_of(node), self.timeline.reached_us[node])


def _messages(start: fx.Node, communication: Communication) -> Iterator[Message]:
    items = [u for u in start.users if role_of(u) in _ITEMS] or [start]
    # A reduce-scatter returns this rank's part of the message, the others all of it.
    ranks = communication.ranks if communication.kind is Kind.REDUCE else 1
    for item in items:
        names = require(item).parameters
        size_bytes = sum(map(tensor_bytes, tensors_of(item))) * ranks
        yield Message(names, Layout.OWN if len(names) == 1 else Layout.PACKED, size_bytes)


def _end_of_life(waits: list[fx.Node], order: dict[fx.Node, int]) -> tuple[fx.Node | None, fx.Node | None]:
    users = {user for node in aliases(waits) for user in node.users}
    reshards = [user for user in users if role_of(user) is Role.RESHARD]
    uses = users - set(reshards)
    return max(uses, key=order.__getitem__, default=None), max(reshards, key=order.__getitem__, default=None)


def _exposure(transfer: Transfer) -> tuple[Exposure, str]:
    needed_us = transfer.end_us - transfer.begin_us
    needed, computed = time(needed_us), time(transfer.computed_us)
    if transfer.exposed_us < _NEGLIGIBLE_US:
        return Exposure.HIDDEN, f"{computed} of compute cover {needed} on the link"
    if transfer.computed_us < _NEGLIGIBLE_SHARE * needed_us:
        return Exposure.NO_COMPUTE, f"almost nothing is computed during {needed} on the link"
    if transfer.computed_us >= needed_us:
        return Exposure.QUEUED, f"the link is busy for {time(transfer.queued_us)} after the start"
    return Exposure.TOO_SHORT, f"only {computed} of compute for {needed} on the link"
