"""One link of a rank into the network: transfers wait in lanes, and lanes share the bandwidth.

A lane is a queue, as one process group's stream is: a transfer starts when the one before it in its lane has ended. It
costs the latency first and its bytes after that. Lanes that send at the same moment each get an equal share of the
bandwidth, so that a second process group adds order, and no bandwidth.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque


@dataclasses.dataclass(frozen=True)
class Link:
    """How fast a rank sends.

    Attributes:
        bytes_per_s: Bandwidth in one direction; `math.inf` for a network that costs latency only.
        latency_s: What every collective costs before its first byte.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ValueError(f"a link needs bandwidth above 0 and latency of at least 0, and this is {self}")


@dataclasses.dataclass(eq=False)
class Transfer:
    """One collective under way.

    Attributes:
        number: Counts the transfers of a wire.
        latency_s: Latency that is left.
        left_bytes: Bytes that are left.
        end_s: When it ended; `None` before.
    """

    number: int
    latency_s: float
    left_bytes: float
    end_s: float | None = None


class Wire:
    """What has been sent and what is under way, as a function of the calls made so far; it keeps no time by itself."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lanes: dict[str, deque[Transfer]] = {}
        self._time_s = 0.0
        self._count = 0

    def submit(self, lane: str, size_bytes: float, now_s: float) -> Transfer:
        """Queues a transfer.

        Args:
            lane: The queue.
            size_bytes: What this rank sends.
            now_s: The time, which never goes back from call to call.
        """
        self.advance(now_s)
        transfer = Transfer(self._count, self.link.latency_s, size_bytes)
        self._count += 1
        self._lanes.setdefault(lane, deque()).append(transfer)
        return transfer

    def advance(self, now_s: float) -> None:
        """Moves everything that is under way to `now_s`."""
        while self._time_s < now_s and self._heads():
            self._step(now_s)
        self._time_s = max(self._time_s, now_s)

    def end_s(self, transfer: Transfer) -> float:
        """When a transfer ends, if nothing else is submitted before."""
        if transfer.end_s is not None:
            return transfer.end_s
        ahead = copy.deepcopy(self)
        same = next(t for lane in ahead._lanes.values() for t in lane if t.number == transfer.number)
        while same.end_s is None:
            ahead._step(math.inf)
        return same.end_s

    def _heads(self) -> list[Transfer]:
        return [lane[0] for lane in self._lanes.values() if lane]

    def _step(self, until_s: float) -> None:
        """Goes on to the next moment at which a latency or a transfer ends, or to `until_s` if that is before it."""
        heads = self._heads()
        sending = [t for t in heads if t.latency_s <= 0]
        rate = self.link.bytes_per_s / max(len(sending), 1)
        ends = {t: t.latency_s if t.latency_s > 0 else t.left_bytes / rate for t in heads}
        step_s = min(*ends.values(), until_s - self._time_s)
        done = [t for t in heads if ends[t] <= step_s]
        self._time_s += step_s
        for transfer in heads:
            if transfer in sending:
                transfer.left_bytes = 0.0 if transfer in done else transfer.left_bytes - step_s * rate
            else:
                transfer.latency_s = 0.0 if transfer in done else transfer.latency_s - step_s
        for transfer in done:
            if transfer in sending:
                transfer.end_s = self._time_s
        for lane in self._lanes.values():
            if lane and lane[0].end_s is not None:
                lane.popleft()
