"""How a sum of gradients over ranks becomes their average: by the collective itself, or by divisions around it."""

from __future__ import annotations

import dataclasses

import torch

from fsdp_compile.layout.spec import UnshardSpec


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Divisions around the collectives of a reduction.

    Attributes:
        before: Divisor of each rank's message before the first collective; `None` for none.
        operation: How collectives combine ranks, "avg" or "sum".
        after: Divisor of the sum after the last collective; `None` for none.
    """

    before: float | None
    operation: str
    after: float | None


def scaling(spec: UnshardSpec) -> Scaling:
    """How gradients of a parameter are averaged."""
    # A hook divides by itself; replicas are averaged after it.
    if spec.hook:
        return Scaling(None, "avg", None)
    divisor = float(spec.size * spec.replicas) if spec.divide is None else spec.divide
    if spec.reduce_dtype is torch.float16:
        before = 1.0
        # float16 overflows in a sum over many ranks: a power of two near the square root of the divisor is divided out
        # before, the rest after.
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Scaling(_unless_one(before), "sum", _unless_one(divisor / before))
    if spec.divide is None:
        return Scaling(None, "avg", None)
    return Scaling(None, "sum", _unless_one(divisor))


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor
