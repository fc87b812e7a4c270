"""Memory that an initialization is to fill, and what of it no operator has written.

It is filled with marks, values that no initialization gives. A dtype without such a value is full of zeros, and counts
as written as soon as one operator has written into it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Blanks:
    """Memory of one call of `materialize`."""

    def __init__(self) -> None:
        # With the tensors, so that no other memory gets the same address.
        self._untouched: dict[int, torch.Tensor] = {}

    def make(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor like `like` on `device`, without a value."""
        return self.add(torch.empty(like.shape, dtype=like.dtype, device=device))

    def add(self, value: torch.Tensor) -> torch.Tensor:
        """Marks all of `value`."""
        mark = _mark(value.dtype)
        # Not `fill_`, which float8 formats do not all have.
        value.zero_() if mark is None else value.fill_(mark)
        if mark is None and address(value):
            self._untouched[address(value)] = value
        return value

    def note_written(self, values: Iterable[torch.Tensor]) -> None:
        """Notes what an operator writes into."""
        if self._untouched:
            for value in values:
                self._untouched.pop(address(value), None)

    def have(self, value: torch.Tensor) -> bool:
        """Whether an element of `value` was never written."""
        mark = _mark(value.dtype)
        if mark is None or value.numel() == 0:
            return mark is None and address(value) in self._untouched
        marked = value != value if mark != mark else value == mark  # noqa: PLR0124  NaN is not equal to itself
        return bool(marked.any())


def _mark(dtype: torch.dtype) -> float | int | None:
    if dtype in _INTEGERS:
        return torch.iinfo(dtype).min
    narrow = dtype.is_floating_point and dtype.itemsize < 2  # float8 formats: not all have NaN, few have operators
    return float("nan") if (dtype.is_floating_point and not narrow) or dtype.is_complex else None


def address(value: torch.Tensor) -> int:
    """Where the memory of a plain tensor begins; 0 if it has none."""
    return 0 if isinstance(value, DTensor) else value.untyped_storage().data_ptr()
