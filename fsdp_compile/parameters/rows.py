"""Which rows of a parameter a rank holds: the chunks of `torch.chunk`, as DTensor's `Shard` has them."""

from __future__ import annotations

import torch


def local_rows(rows: int, size: int, rank: int) -> tuple[int, int]:
    """First row and number of rows that `rank` of `size` holds; none when rows have run out."""
    chunk = -(-rows // size)
    start = min(rank * chunk, rows)
    return start, min(chunk, rows - start)


def local_shape(shape: tuple[int, ...], dim: int | None, size: int, rank: int) -> tuple[int, ...]:
    """Shape of what `rank` holds of a parameter of `shape` that is sharded on `dim`."""
    if dim is None:
        return shape
    return (*shape[:dim], local_rows(shape[dim], size, rank)[1], *shape[dim + 1 :])


def local_part(full: torch.Tensor, dim: int | None, size: int, rank: int) -> torch.Tensor:
    """The view of a full tensor that `rank` holds."""
    if dim is None:
        return full
    return full.narrow(dim, *local_rows(full.shape[dim], size, rank))
