"""Accumulation of a compiled model's gradients over microbatches, beside one process."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fsdp_compile import no_sync
from tests.two_sides import WithOneProcess


def check_accumulation(make: Callable[[], nn.Module], width: int) -> None:
    """On a rank: two steps of two microbatches, the first of each under `no_sync`; inputs are `[rows, width]`."""
    pair = WithOneProcess(make, shape=width, twice=False)
    for _ in range(2):
        with no_sync(pair.model):
            pair.backward()
        pair.backward()
    pair.compare_gradients()
