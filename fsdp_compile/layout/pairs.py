"""Complex parameters as pairs of real numbers, as which they are stored, sent and reduced.

    parameter [5, 3], complex64      stored [5, 3, 2], float32      read as a complex view of what is gathered

Backends average real numbers, so specs, messages and graphs know nothing else: the spec of a complex parameter has a
last dimension of two. Everything else about it (its DTensor, its gradient, the state of optimizers) is complex.
"""

from __future__ import annotations

import torch


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the numbers that values of `dtype` consist of."""
    return dtype.to_real() if dtype.is_complex else dtype


def stored_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of these numbers for values of `shape` and `dtype`."""
    return (*shape, 2) if dtype.is_complex else tuple(shape)


def as_stored(value: torch.Tensor) -> torch.Tensor:
    """A view of these numbers; the value itself if it is real."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def as_read(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The view of numbers as values of a complex `dtype`; themselves for any other."""
    return torch.view_as_complex(stored) if dtype.is_complex else stored
