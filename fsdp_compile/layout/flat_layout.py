"""Where each parameter of a unit lies in the unit's flat parameters: a plan, made without memory.

Each slot starts at a multiple of `ALIGNMENT_BYTES` and ends at one, in the stored dtype, in those that are sent and
reduced, and in 16 bits: misaligned message slices have been seen to run an all-gather 12 times slower, and Inductor
copies inputs that are not aligned. Every rank's flat parameter has the same size, so ranks with fewer rows (or none)
have padding; rows are divided as by `torch.chunk`, as DTensor's `Shard` does.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class ParameterShape:
    """The full shape of one parameter, and the dimension to shard: `None` for a single number, or a pair."""

    shape: tuple[int, ...]
    dim: int | None


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter's place in its flat parameter; all numbers in elements of the flat parameter.

    Attributes:
        index: Position of the parameter in the list that was planned.
        offset: First element.
        extent: Elements up to the next slot, padding included.
    """

    index: int
    offset: int
    extent: int


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """Slots of one flat parameter in the order of their offsets, and its size in elements (the same on every rank)."""

    slots: tuple[Slot, ...]
    numel: int


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
    parameters: Sequence[ParameterShape],
    *,
    size: int,
    stored: torch.dtype,
    sent: torch.dtype,
    reduced: torch.dtype | None = None,
    per_byte: int = 0,
) -> FlatLayout:
    """Lays parameters out one after the other: small ones first, so that they are sent as one packed piece.

    Args:
        parameters: In the module's registration order, which stays among small and among large ones.
        size: Ranks in the shard group.
        stored: Dtype of the flat parameter.
        sent: Dtype of all-gathers, which may be narrower.
        reduced: Dtype of reductions; by default `sent`.
        per_byte: Elements that are sent in a byte, if large parameters are sent in a `WireFormat`.
    """
    narrowest = min(AUTOCAST_BYTES, *(dtype.itemsize for dtype in (stored, sent, reduced or sent)))
    step = ALIGNMENT_BYTES * per_byte or ALIGNMENT_BYTES // narrowest  # of which slots are a multiple
    numels = [shard_numel(p.shape, p.dim, size) for p in parameters]
    order = sorted(range(len(parameters)), key=lambda i: numels[i] * stored.itemsize >= LARGE_BYTES)
    slots = []
    offset = 0
    for index in order:
        extent = -(-max(numels[index], 1) // step) * step  # never 0: a slot is known by its offset
        slots.append(Slot(index, offset, extent))
        offset += extent
    return FlatLayout(tuple(slots), max(offset, step))  # never 0: a flat parameter is known by its address
