"""How far two tensors are apart, in absolute numbers, in relative ones, and in units of the last place."""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum

import torch


class Quantity(StrEnum):
    """What is compared, in the order in which a step makes it."""

    LOSS = "loss"
    GRADIENT = "gradient"
    PARAMETER = "parameter"
    STATE = "optimizer state"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor of one step on both sides.

    Attributes:
        quantity: What kind of tensor.
        name: Of the parameter, with the optimizer's key for its state; "loss" for losses.
        step: From 0.
        dtype: Of the reference.
        different: How many elements differ in a bit.
        numel: How many elements there are.
        absolute: Largest difference; infinite where one side has a value that the other does not have at all.
        relative: `absolute` over the largest magnitude of the reference.
        ulps: `absolute` in units of the last place of the largest element of the reference.
        bound: The largest `absolute` that the level allows; infinite where it is reported and not judged.
    """

    quantity: Quantity
    name: str
    step: int
    dtype: torch.dtype
    different: int
    numel: int
    absolute: float
    relative: float
    ulps: float
    bound: float = 0.0

    @property
    def exceeds(self) -> bool:
        """Whether the level does not allow it."""
        return self.different > 0 if self.bound == 0 else not self.absolute <= self.bound


def compare(
    quantity: Quantity, name: str, step: int, ours: torch.Tensor | None, theirs: torch.Tensor | None
) -> Difference:
    """Compares two tensors that should be equal.

    Args:
        quantity: What kind of tensor.
        name: See `Difference`.
        step: From 0.
        ours: The compiled side's, or `None` (no gradient).
        theirs: The reference's, or `None`.
    """
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return _incomparable(quantity, name, step, ours, theirs)
    ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
    different = int((_bits(ours) != _bits(theirs)).sum())
    absolute = _largest_difference(ours.double(), theirs.double()) if different else 0.0
    scale = magnitude(theirs)
    return Difference(
        quantity=quantity,
        name=name,
        step=step,
        dtype=theirs.dtype,
        different=different,
        numel=theirs.numel(),
        absolute=absolute,
        relative=absolute / scale if scale else math.copysign(math.inf, 1) if absolute else 0.0,
        ulps=absolute / last_place(scale, theirs.dtype),
    )


def magnitude(tensor: torch.Tensor) -> float:
    """The largest finite magnitude in a tensor; 0 for an empty one."""
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().double().abs().nan_to_num(nan=0.0, posinf=0.0).max())


def last_place(value: float, dtype: torch.dtype) -> float:
    """The distance from `value` to the next larger number of `dtype`; 1 for integers."""
    if not dtype.is_floating_point:
        return 1.0
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(abs(value), info.tiny)))
    return info.eps * 2.0**exponent


def _largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance = torch.where(same, 0.0, (ours - theirs).abs())
    return float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.dtype.itemsize])


def _incomparable(
    quantity: Quantity, name: str, step: int, ours: torch.Tensor | None, theirs: torch.Tensor | None
) -> Difference:
    """Both absent is equal; one absent, another shape or another dtype is infinitely far."""
    absent = ours is None and theirs is None
    known = theirs if theirs is not None else ours
    return Difference(
        quantity=quantity,
        name=name,
        step=step,
        dtype=known.dtype if known is not None else torch.float32,
        different=0 if absent or known is None else max(1, known.numel()),
        numel=0 if known is None else known.numel(),
        absolute=0.0 if absent else math.inf,
        relative=0.0 if absent else math.inf,
        ulps=0.0 if absent else math.inf,
    )
