"""How far apart two right computations in floating point may be: bounds derived before anything is measured.

Both sides round differently because they add in different orders and fuse different operators. With unit roundoff `u`
(half the distance from 1 to the next number), a value on a path of m roundings whose errors are independent and have
mean zero carries a relative error of at most `lambda * sqrt(m) * u` with probability `1 - 2 exp(-lambda^2 / 2)`
(N. Higham and T. Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41, 2019,
theorem 2.4). `lambda` is chosen so that this holds for all elements of a run together but for one run in a million.

A step's gradient has been through `depth` operators, each of which adds up at most `length` numbers and rounds its
result: `depth * length` roundings in the dtype that sums are kept in (at least float32), `depth` in the dtype that
results are stored in. Step k starts from parameters that k steps made, which multiplies `depth` by k + 1. Two sides
differ by twice the error of one.

The relative error counts against the largest element of the tensor. A gradient that is small because its terms cancel
is as uncertain as these terms, and they may be as large as the largest gradient of the model: one more sum's error of
that size is allowed, without the depth. `docs/parity.md` says what this assumes.
"""

from __future__ import annotations

import dataclasses
import math

import torch

_ONCE_IN = 1e6
"""Of so many runs, one may exceed the bound by chance alone."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """What the bounds of a run depend on.

    Attributes:
        depth: Differentiable operators on the longest path from a parameter to the loss, twice (forward, backward).
        length: Terms of the longest sum.
        elements: Compared in the whole run.
        dtype: The narrowest one that results are stored in.
    """

    depth: int
    length: int
    elements: int
    dtype: torch.dtype

    @property
    def _lambda(self) -> float:
        return math.sqrt(2 * math.log(2 * max(1, self.elements) * _ONCE_IN))

    def path(self, step: int) -> float:
        """Relative difference that a whole path of step `step` (from 0) may show."""
        return self._error(self.depth * (step + 1))

    def sum(self) -> float:
        """Relative difference that one sum may show, relative to its largest term times the root of their number."""
        return self._error(1)

    def _error(self, depth: int) -> float:
        wide = _roundoff(torch.promote_types(self.dtype, torch.float32))
        stored = math.sqrt(depth) * _roundoff(self.dtype)
        return 2 * self._lambda * (math.sqrt(depth * self.length) * wide + (stored if self.is_narrow else 0.0))

    @property
    def is_narrow(self) -> bool:
        """Whether results are stored in a narrower dtype than sums are kept in."""
        return self.dtype.itemsize < torch.float32.itemsize


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def depth_of(loss: torch.Tensor) -> int:
    """Nodes on the longest path of the autograd graph below `loss`, twice: forward and backward."""
    depth: dict[object, int] = {}
    stack = [(loss.grad_fn, False)]
    while stack:
        node, done = stack.pop()
        if node is None or node in depth:
            continue
        below = [child for child, _ in node.next_functions if child is not None]
        if done:
            depth[node] = 1 + max((depth[child] for child in below), default=0)
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in below)
    return 2 * max(depth.values(), default=1)
