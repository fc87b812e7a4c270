"""Memory that is to be initialized, filled with marks, so that what an initialization forgot is noticed."""

from __future__ import annotations

import torch

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def blank(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like `like` on `device`, full of marks; zeros in dtypes that have no value to spare."""
    value = torch.zeros(like.shape, dtype=like.dtype, device=device)
    mark = _mark(like.dtype)
    return value if mark is None else value.fill_(mark)


def has_marks(value: torch.Tensor) -> bool:
    """Whether an element was never written."""
    mark = _mark(value.dtype)
    if mark is None or value.numel() == 0:
        return False
    marked = value != value if mark != mark else value == mark  # noqa: PLR0124  NaN is not equal to itself
    return bool(marked.any())


def _mark(dtype: torch.dtype) -> float | int | None:
    if dtype in _INTEGERS:
        return torch.iinfo(dtype).min
    narrow = dtype.is_floating_point and dtype.itemsize < 2  # float8 formats: not all have NaN, few have operators
    return float("nan") if (dtype.is_floating_point and not narrow) or dtype.is_complex else None
