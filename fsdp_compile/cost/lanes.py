"""A link that several queues of collectives share: each of those that send at a moment gets an equal part of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable


@dataclasses.dataclass
class _Sending:
    """A collective on its way, and the time that it still takes when it has the link for itself."""

    key: Hashable
    left_us: float


class SharedLink:
    """Times of the collectives of one link, told in the order in which they start."""

    def __init__(self) -> None:
        self._now_us = 0.0
        self._lanes: dict[str, list[_Sending]] = {}
        self._begins_us: dict[Hashable, float] = {}
        self._ends_us: dict[Hashable, float] = {}

    def start(self, key: Hashable, lane: str, time_us: float, now_us: float) -> None:
        """Queues a collective on a lane; nothing starts before it that is told later."""
        self._play(now_us)
        queue = self._lanes.setdefault(lane, [])
        if not queue:
            self._begins_us[key] = self._now_us
        queue.append(_Sending(key, time_us))

    def span_us(self, key: Hashable, now_us: float) -> tuple[float, float]:
        """When a collective begins and ends, if nothing else starts before it has ended."""
        self._play(now_us)
        while key not in self._ends_us:
            self._end_next(float("inf"))
        return self._begins_us[key], self._ends_us[key]

    def _play(self, until_us: float) -> None:
        while self._end_next(until_us):
            pass
        self._now_us = max(self._now_us, until_us)

    def _end_next(self, until_us: float) -> bool:
        """Goes on to the end of the collective that ends next, or part of the way."""
        sending = {lane: queue[0] for lane, queue in self._lanes.items() if queue}
        if not sending:
            return False
        least_us = min(each.left_us for each in sending.values())
        end_us = self._now_us + least_us * len(sending)
        if end_us > until_us:
            for each in sending.values():
                each.left_us -= max(0.0, until_us - self._now_us) / len(sending)
            return False
        self._now_us = end_us
        for lane, each in sending.items():
            each.left_us -= least_us
            if each.left_us <= 0.0:
                self._ends_us[each.key] = end_us
                queue = self._lanes[lane]
                queue.pop(0)
                if queue:
                    self._begins_us[queue[0].key] = end_us
        return True
