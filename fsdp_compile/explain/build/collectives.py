"""Reports of collectives, and of copies between host and device: messages, places, and whether compute waits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fsdp_compile.cost.communicate import Communication, Kind
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
    """Reports every collective and every copy of a graph, in the order in which they start."""
    order = step.order()

    def place(node: fx.Node) -> Place:
        return Place(node.name, order[node], module_of(node), schedule.timeline.reached_us[node])

    for start, communication in schedule.communications.items():
        transfer = schedule.timeline.transfers[start]
        waits = sorted(waits_of(start), key=order.__getitem__)
        last_use, reshard = _end_of_life(waits, order) if communication.kind is Kind.GATHER else (None, None)
        exposure, reason = _exposure(transfer)
        yield Collective(
            kind=communication.kind,
            unit=", ".join(require(start).units),
            messages=tuple(_messages(start, communication)),
            dtype=str(tensors_of(waits[0] if waits else start)[0].dtype).removeprefix("torch."),
            group=communication.group,
            ranks=communication.ranks,
            link=communication.sent_on,
            bytes_per_s=communication.bytes_per_s,
            size_bytes=communication.size_bytes,
            sent_bytes=communication.sent_bytes,
            start=place(start),
            wait=place(waits[0]) if waits else None,
            last_use=place(last_use) if last_use is not None else None,
            reshard=place(reshard) if reshard is not None else None,
            issued_us=transfer.issued_us,
            begin_us=transfer.begin_us,
            end_us=transfer.end_us,
            computed_us=transfer.computed_us,
            exposed_us=transfer.exposed_us,
            exposure=exposure,
            reason=reason,
        )


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
