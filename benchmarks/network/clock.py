"""Time as the emulated network sees it: the wall's, or one that a test moves by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some start."""

    threads: bool
    """Whether other threads may work while this one computes; they may not where time stands still meanwhile."""

    def now_s(self) -> float:
        """The time."""

    def sleep_until(self, time_s: float) -> None:
        """Returns at `time_s`, or at once if that has passed."""


class WallClock:
    """Real time."""

    threads = True

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.perf_counter()

    def sleep_until(self, time_s: float) -> None:
        """Sleeps without the interpreter's lock."""
        left_s = time_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class VirtualClock:
    """Time that passes only where it is told to: waiting for a collective, or `compute(seconds)`."""

    threads = False

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """Seconds that have been spent."""
        return self._now_s

    def sleep_until(self, time_s: float) -> None:
        """Moves time forward."""
        self._now_s = max(self._now_s, time_s)

    def compute(self, seconds: float) -> None:
        """Lets a computation take its time."""
        self._now_s += seconds
