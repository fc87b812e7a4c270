"""How long something takes on a device: the median of a few runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

WARM_UP: Final = 1
"""Runs that are not counted: the first one may pick a kernel or allocate memory."""


def median_us(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Time in us of a run, all that it starts on the device included, out of so many."""
    samples = []
    with torch.no_grad():
        for _ in range(WARM_UP + rounds):
            _synchronize(device)
            start_s = time.perf_counter()
            run()
            _synchronize(device)
            samples.append((time.perf_counter() - start_s) * 1e6)
    return statistics.median(samples[WARM_UP:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
