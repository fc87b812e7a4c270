"""Lanes side by side: compute in program order, and one queue of collectives for each process group.

compute       | a ------ | wait | b ------ |
fsdp.shard.0  |  gather ---------|

Groups over the same ranks send on one link, and share its bandwidth equally while both send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

from fsdp_compile.cost.lanes import SharedLink


@dataclasses.dataclass(frozen=True)
class Compute:
    """Keeps the compute lane busy."""

    key: Hashable
    time_us: float


@dataclasses.dataclass(frozen=True)
class Start:
    """Queues a collective on a lane and goes on.

    Attributes:
        key: Its name.
        lane: Its queue.
        time_us: How long it takes when it has the link for itself.
        link: What lanes share; empty for a lane with a link of its own.
    """

    key: Hashable
    lane: str
    time_us: float
    link: str = ""


@dataclasses.dataclass(frozen=True)
class Wait:
    """Holds the compute lane until the collective `start` is done."""

    key: Hashable
    start: Hashable


Event = Compute | Start | Wait


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective in time, in us from the start of the schedule.

    Attributes:
        lane: Its lane.
        link: What it is sent on.
        time_us: How long it takes when it has the link for itself.
        issued_us: When compute reached its start.
        begin_us: When the lane was free for it.
        end_us: When it was done.
        waited_us: When compute first reached a wait for it; `None` if nothing waits.
        exposed_us: How long compute stood still in its waits.
        computed_us: Time that compute spent computing between start and first wait.
    """

    lane: str
    link: str
    time_us: float
    issued_us: float
    begin_us: float
    end_us: float
    waited_us: float | None
    exposed_us: float
    computed_us: float

    @property
    def queued_us(self) -> float:
        """Time behind other collectives of the lane."""
        return self.begin_us - self.issued_us


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated schedule.

    Attributes:
        reached_us: When compute reached each event.
        transfers: Collectives by the key of their start.
        compute_us: Sum of all computing.
        end_us: When both compute and every lane are done.
    """

    reached_us: dict[Hashable, float]
    transfers: dict[Hashable, Transfer]
    compute_us: float
    end_us: float

    @property
    def exposed_us(self) -> float:
        """How long compute stood still."""
        return sum(transfer.exposed_us for transfer in self.transfers.values())

    @property
    def busy_us(self) -> dict[str, float]:
        """Time that each link was busy."""
        busy: dict[str, float] = {}
        for transfer in self.transfers.values():
            busy[transfer.link] = busy.get(transfer.link, 0.0) + transfer.time_us
        return busy


def simulate(events: Iterable[Event]) -> Timeline:
    """Plays a schedule.

    Args:
        events: In program order; keys are unique, and a wait comes after its start.
    """
    now = 0.0
    computed = 0.0
    links: dict[str, SharedLink] = {}
    reached: dict[Hashable, float] = {}
    computed_at: dict[Hashable, float] = {}
    started: dict[Hashable, tuple[Start, float]] = {}
    waited: dict[Hashable, tuple[float, float]] = {}
    stood: dict[Hashable, float] = {}
    for event in events:
        reached[event.key] = now
        match event:
            case Compute():
                now += event.time_us
                computed += event.time_us
            case Start():
                links.setdefault(event.link or event.lane, SharedLink()).start(
                    event.key, event.lane, event.time_us, now
                )
                computed_at[event.key] = computed
                started[event.key] = (event, now)
            case Wait():
                start, _ = started[event.start]
                _, end_us = links[start.link or start.lane].span_us(event.start, now)
                waited.setdefault(event.start, (now, computed - computed_at[event.start]))
                stood[event.start] = stood.get(event.start, 0.0) + max(0.0, end_us - now)
                now = max(now, end_us)
    transfers: dict[Hashable, Transfer] = {}
    for key, (start, issued_us) in started.items():
        sent_on = start.link or start.lane
        begin_us, end_us = links[sent_on].span_us(key, now)
        waited_us, between_us = waited.get(key, (None, 0.0))
        transfers[key] = Transfer(
            start.lane, sent_on, start.time_us, issued_us, begin_us, end_us, waited_us, stood.get(key, 0.0), between_us
        )
    return Timeline(reached, transfers, computed, max([now, *(t.end_us for t in transfers.values())]))
