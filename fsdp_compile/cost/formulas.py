"""The formulas of the model, over plain numbers or sympy expressions alike. Times in us, sizes in byte."""

from __future__ import annotations

import math
from typing import Any

import sympy


def maximum(a: Any, b: Any) -> Any:
    """The larger of two numbers; an open expression if one of them is open."""
    return sympy.Max(a, b) if isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr) else max(a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two numbers; an open expression if one of them is open."""
    return sympy.Min(a, b) if isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr) else min(a, b)


def log2(x: Any) -> Any:
    """Logarithm to base 2."""
    return sympy.log(x, 2) if isinstance(x, sympy.Expr) else math.log2(x)


def roofline_us(flops: Any, size_bytes: Any, flops_per_s: Any, bytes_per_s: Any) -> Any:
    """Time of a kernel that computes and moves memory at once."""
    return maximum(flops * 1e6 / flops_per_s, size_bytes * 1e6 / bytes_per_s)


def share_of_others(ranks: Any) -> Any:
    """Share of a sharded whole that is on the other ranks: `(N-1)/N`."""
    return (ranks - 1) / ranks
