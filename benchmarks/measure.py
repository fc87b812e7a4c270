"""Measuring side by side: contenders take turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Run = Callable[[], object]


@dataclasses.dataclass
class Samples:
    """What one contender took.

    Attributes:
        seconds: One per round.
        error: Why it takes part no longer, if it does not.
    """

    seconds: list[float] = dataclasses.field(default_factory=list)
    error: str | None = None

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Median and spread as plain data, or the error."""
        if self.error is not None or not self.seconds:
            return {"error": self.error or "never ran"}
        return {
            "median_s": self.median_s,
            "least_s": min(self.seconds),
            "most_s": max(self.seconds),
            "rounds": len(self.seconds),
        }


def alternate(runs: Mapping[str, Run], *, rounds: int, warm_up: int = 1) -> dict[str, Samples]:
    """Times each of `runs` once per round, in turn.

    Each runs twice, and the second time counts: the first finds caches and memory as another contender left them.

    Args:
        runs: What to time, by name.
        rounds: How often.
        warm_up: Rounds before that, which are not counted.
    """
    samples = {name: Samples() for name in runs}
    with _old_objects_left_alone():
        for number in range(-warm_up, rounds):
            for name, run in runs.items():
                if samples[name].error is None:
                    with recorded(samples[name]):
                        run()
                        seconds = time_once(run)
                        if number >= 0:
                            samples[name].seconds.append(seconds)
    return samples


def median_ratio(samples: Samples, to: Samples) -> float:
    """The median of how many times as long one contender took as another in the same round, as `alternate` made them.

    Round by round, since a machine that is slow for a while is slow for both.
    """
    return statistics.median(one / other for one, other in zip(samples.seconds, to.seconds, strict=True))


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Keeps the garbage collector from what is there already: each contender would pay for the graphs of all others."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def time_once(run: Run) -> float:
    """Seconds until `run` is done, on the device, too."""
    synchronize()
    start_s = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start_s


def synchronize() -> None:
    """Waits for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def recorded(samples: Samples) -> Iterator[None]:
    """One contender's failure is a line of the result, not the end of the others."""
    try:
        yield
    except Exception as error:
        samples.error = explained(error)


def explained(error: BaseException) -> str:
    """An error in one line, with where it came from."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line[:300]} (in {place.name})"
