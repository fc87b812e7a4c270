"""The process's random number generators, which a trace leaves as they were.

What a forward does in Python runs while it is traced, and may draw numbers; a rank that explains would then draw others
than its neighbours do.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restores the states of Python's, numpy's and torch's generators after the block."""
    numpy_random = sys.modules.get("numpy.random")
    of_python = random.getstate()
    of_numpy = None if numpy_random is None else numpy_random.get_state()
    # A device that was never used has drawn nothing; to ask would set it up.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        if numpy_random is not None:
            numpy_random.set_state(of_numpy)
