"""Where each parameter of a unit lies in the unit's flat parameters: a plan, made without memory.

Each slot starts at a multiple of `ALIGNMENT_BYTES` and ends at one, in the stored dtype, in those that are sent and
reduced, and in 16 bits: misaligned message slices have been seen to run an all-gather 12 times slower, and Inductor
copies inputs that are not aligned. Every rank's flat parameter has the same size, so ranks with fewer rows (or none)
have padding; rows are divided as by `torch.chunk`, as DTensor's `Shard` does.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 128
AUTOCAST_BYTES = 2
"""Of an element of what `torch.autocast` casts to, in which any parameter may be sent."""
LARGE_BYTES = 16 * 1024
"""A slot whose share per rank is at least this is sent as a message piece of its own."""


class ReduceLayout(enum.StrEnum):
    """How the gradients of a bucket are laid out in the messages of its reduction."""

    ALIGNED = "aligned"
    """As flat parameters are: small slots in one message, each large one in its own, padding included."""
    FSDP2 = "fsdp2"
    """As FSDP2 does: one message, every parameter in the order of registration, without alignment."""


def shard_numel(shape: tuple[int, ...], dim: int | None, size: int) -> int:
    """Elements of a parameter on each rank, row padding included."""
    if dim is None:
        return math.prod(shape)
    rows = -(-shape[dim] // size)
    return rows * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def is_large(shape: tuple[int, ...], dim: int | None, size: int, stored: torch.dtype) -> bool:
    """Whether a parameter's share per rank is a message of its own."""
    return shard_numel(shape, dim, size) * stored.itemsize >= LARGE_BYTES


def plan_layout(
    numels: Sequence[int],
    *,
    stored: torch.dtype,
    sent: torch.dtype,
    reduced: torch.dtype | None = None,
    per_byte: int = 0,
) -> list[tuple[int, int]]:
    """Lays parameters out one after the other: small ones first, so that they are sent as one packed piece.

    Args:
        numels: Their elements on each rank, in the module's registration order, which stays among small and among large
            ones.
        stored: Dtype of the flat parameter.
        sent: Dtype of all-gathers, which may be narrower.
        reduced: Dtype of reductions; by default `sent`.
        per_byte: Elements that are sent in a byte, if large parameters are sent in a `WireFormat`.

    Returns:
        For each parameter its first element in the flat parameter, and its elements there, padding included.
    """
    narrowest = min(AUTOCAST_BYTES, *(dtype.itemsize for dtype in (stored, sent, reduced or sent)))
    step = ALIGNMENT_BYTES * per_byte or ALIGNMENT_BYTES // narrowest  # of which slots are a multiple
    places, offset = [(0, 0)] * len(numels), 0
    for index in sorted(range(len(numels)), key=lambda i: numels[i] * stored.itemsize >= LARGE_BYTES):
        extent = -(-max(numels[index], 1) // step) * step  # never 0: a slot is known by its offset
        places[index] = offset, extent
        offset += extent
    return places
