"""What outputs of emulated collectives hold: every other rank is taken to have brought what this one brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_SAME = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.BAND, dist.ReduceOp.BOR)
"""Reductions of equal values that are the value itself."""


def gather(output: torch.Tensor, own: torch.Tensor) -> None:
    """Every rank's place in `output` holds this rank's part, which in-place gathers have there already."""
    places = output.detach().view(-1, own.numel())
    own = own.detach().reshape(1, -1)
    distance_bytes = own.data_ptr() - places.data_ptr()
    if own.numel() and 0 <= distance_bytes < total_bytes([places]):
        here = distance_bytes // total_bytes([own])
        places[:here].copy_(own)
        places[here + 1 :].copy_(own)
    else:
        places.copy_(own)


def reduce_into(output: torch.Tensor, own: torch.Tensor, factor: float) -> None:
    """`output` is `own` times what the reduction multiplies by; both may be the same memory."""
    own = own.detach().view_as(output)
    if factor != 1:
        torch.mul(own, factor, out=output)
    elif output.data_ptr() != own.data_ptr():
        output.copy_(own)


def part(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of what is scattered."""
    return whole.detach().reshape(ranks, -1)[rank]


def exchange(
    output: torch.Tensor, own: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], rank: int
) -> None:
    """Every rank's place in `output` holds what this rank sends to itself: as much as fits, zeros after it.

    Sizes differ where ranks that bring the same still expect different numbers of rows from each other.
    """
    mine = own.detach().split(list(input_sizes))[rank]
    for place in output.detach().split(list(output_sizes)):
        fitting = min(len(place), len(mine))
        place[:fitting].copy_(mine[:fitting])
        place[fitting:].zero_()


def scale(op: Any, ranks: int) -> float:
    """What a reduction of equal values multiplies them by.

    Raises:
        NotImplementedError: For an operation that no data-parallel training uses.
    """
    if op == dist.ReduceOp.SUM:
        return ranks
    if any(op == same for same in _SAME):  # not `in`: only one side of the comparison knows the other's type
        return 1
    if op == dist.ReduceOp.PREMUL_SUM:
        return ranks * op.__getstate__()[1]
    name = next((name for name, known in dist.ReduceOp.RedOpType.__members__.items() if op == known), op)
    raise NotImplementedError(f"the emulated network does not reduce by {name}")


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
