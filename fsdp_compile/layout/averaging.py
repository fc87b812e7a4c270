"""How a sum of gradients over ranks becomes their average: by the collective itself, or by divisions around it."""

from __future__ import annotations

import dataclasses

import torch

from fsdp_compile.layout.spec import UnshardSpec


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What is done to the messages of a reduction.

    Attributes:
        before: What each rank's message is divided by before the first collective; `None` for nothing.
        operation: How collectives combine ranks, "avg" or "sum".
        after: What the sum is divided by after the last collective; `None` for nothing.
    """

    before: float | None
    operation: str
    after: float | None


def scaling(spec: UnshardSpec) -> Scaling:
    """How gradients of a parameter are averaged.

    float16 has too narrow a range for a sum over many ranks: there, a power of two near the square root of the divisor
    is divided out before and the rest after. A hook of the user's divides by itself; replicas are averaged after it.
    """
    if spec.hook:
        return Scaling(None, "avg", None)
    divisor = float(spec.size * spec.replicas) if spec.divide is None else spec.divide
    if spec.reduce_dtype is torch.float16:
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Scaling(_unless_one(before), "sum", _unless_one(divisor / before))
    if spec.divide is None:
        return Scaling(None, "avg", None)
    return Scaling(None, "sum", _unless_one(divisor))


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor
