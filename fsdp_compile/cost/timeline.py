"""Two lanes side by side: compute in program order, and one queue of collectives for each process group.

compute  | a ------ | wait | b ------ |
fsdp.0   |  gather ---------|
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable


@dataclasses.dataclass(frozen=True)
class Compute:
    """Keeps the compute lane busy."""

    key: Hashable
    time_us: float


@dataclasses.dataclass(frozen=True)
class Start:
    """Queues a collective on a lane and goes on."""

    key: Hashable
    lane: str
    time_us: float


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
        issued_us: When compute reached its start.
        begin_us: When the lane was free for it.
        end_us: When it was done.
        waited_us: When compute first reached a wait for it; `None` if nothing waits.
        exposed_us: How long compute stood still in its waits.
        computed_us: Time that compute spent computing between start and first wait.
    """

    lane: str
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
        """Time that each lane was busy."""
        busy: dict[str, float] = {}
        for transfer in self.transfers.values():
            busy[transfer.lane] = busy.get(transfer.lane, 0.0) + transfer.end_us - transfer.begin_us
        return busy


def simulate(events: Iterable[Event]) -> Timeline:
    """Plays a schedule.

    Args:
        events: In program order; keys are unique, and a wait comes after its start.
    """
    now = 0.0
    computed = 0.0
    free: dict[str, float] = {}
    reached: dict[Hashable, float] = {}
    computed_at: dict[Hashable, float] = {}
    transfers: dict[Hashable, Transfer] = {}
    for event in events:
        reached[event.key] = now
        match event:
            case Compute():
                now += event.time_us
                computed += event.time_us
            case Start():
                begin = max(now, free.get(event.lane, 0.0))
                free[event.lane] = begin + event.time_us
                computed_at[event.key] = computed
                transfers[event.key] = Transfer(event.lane, now, begin, begin + event.time_us, None, 0.0, 0.0)
            case Wait():
                transfer = transfers[event.start]
                stood_us = max(0.0, transfer.end_us - now)
                if transfer.waited_us is None:
                    between = computed - computed_at[event.start]
                    transfer = dataclasses.replace(transfer, waited_us=now, computed_us=between)
                transfers[event.start] = dataclasses.replace(transfer, exposed_us=transfer.exposed_us + stood_us)
                now += stood_us
    return Timeline(reached, transfers, computed, max([now, *free.values()]))
