"""Compares tensors, in absolute and relative numbers and in units of the last place, with bounds; reports differences.

Two right computations round differently because they add in different orders and fuse different operators. With unit
roundoff `u` (half the distance from 1 to the next number), a value on a path of m roundings whose errors are
independent and have mean zero carries a relative error of at most `lambda * sqrt(m) * u` with probability `1 - 2
exp(-lambda^2 / 2)` (N. Higham and T. Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci.
Comput. 41, 2019, theorem 2.4). `lambda` is chosen so that this is true for all elements of a run together but for one
run in a million.

A step's gradient has been through `depth` operators, each of which adds up at most `length` numbers and rounds its
result: `depth * length` roundings in the dtype of sums (at least float32), `depth` in the dtype of results. Step k
starts from parameters that k steps made, which multiplies `depth` by k + 1. Two sides differ by twice the error of one.

The relative error counts against the largest element of the tensor. A gradient that is small because its terms cancel
is as uncertain as these terms, and they may be as large as the largest gradient of the model: one more sum's error of
that size is allowed, without the depth. `docs/parity.md` says what this assumes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
from rich.console import RenderableType

from fsdp_compile.explain.tables import Table, as_text

_ONCE_IN = 1e6
"""One in so many runs may exceed the bound by chance alone."""
_SHOWN = 12
_WIDTH = 100
_DISTANCES = ("absolute ", "relative ", "last places ")


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

    def path(self, step: int) -> float:
        """Relative difference that a whole path of step `step` (from 0) may show."""
        return self._error(self.depth * (step + 1))

    def sum(self) -> float:
        """Relative difference that one sum may show, relative to its largest term times the root of their number."""
        return self._error(1)

    def _error(self, depth: int) -> float:
        lambda_ = math.sqrt(2 * math.log(2 * max(1, self.elements) * _ONCE_IN))
        summed = torch.promote_types(self.dtype, torch.float32)
        roundings = math.sqrt(depth * self.length) * torch.finfo(summed).eps / 2
        if self.dtype != summed:
            # A result is rounded once more, to a narrower dtype than its sum has.
            roundings += math.sqrt(depth) * torch.finfo(self.dtype).eps / 2
        return 2 * lambda_ * roundings


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


class Quantity(StrEnum):
    """What is compared; of several that differ in a step, the first one names the place."""

    LOSS = "loss"
    GRADIENT = "gradient"
    PARAMETER = "parameter"
    STATE = "optimizer state"
    BUFFER = "buffer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor of one step on both sides.

    Attributes:
        name: Of the parameter or buffer, with the optimizer's key for its state; "loss" for losses.
        step: From 0.
        dtype: Of the reference.
        different: How many numbers differ in a bit.
        numel: Of how many: a complex element is two, its real and its imaginary part.
        absolute: Largest difference; infinite where one side has a value that the other does not have at all.
        relative: `absolute` over the largest magnitude of the reference.
        ulps: `absolute` in units of the last place of the largest number of the reference.
        bound: The largest `absolute` that the level allows; infinite where it is reported and not compared.
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
    """Compares the compiled side's tensor with the reference's; `None` is no gradient."""
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        # Both absent are equal; where one is, or another shape or dtype, they are infinitely far from each other.
        known, far = theirs if theirs is not None else ours, math.inf
        if known is None:
            known, far = torch.empty(0), 0.0
        return Difference(
            quantity=quantity, name=name, step=step, dtype=known.dtype, numel=known.numel(), absolute=far,
            different=max(1, known.numel()) if far else 0, relative=far, ulps=far,
        )  # fmt: skip
    different = int((_bits(ours) != _bits(theirs)).sum())
    absolute = 0.0
    if different:
        mine, other = _numbers(ours), _numbers(theirs)
        same = (mine == other) | (mine.isnan() & other.isnan())
        distance = torch.where(same, 0.0, (mine - other).abs())
        absolute = float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max())
    scale, last_place = magnitude(theirs), 1.0
    if theirs.is_floating_point() or theirs.is_complex():
        info = torch.finfo(theirs.dtype)
        last_place = info.eps * 2.0 ** math.floor(math.log2(max(scale, info.tiny)))
    return Difference(
        quantity=quantity, name=name, step=step, dtype=theirs.dtype, numel=_real(theirs).numel(), absolute=absolute,
        different=different, relative=absolute / scale if scale else math.inf if absolute else 0.0,
        ulps=absolute / last_place,
    )  # fmt: skip


def magnitude(tensor: torch.Tensor | None) -> float:
    """The largest finite magnitude of a number in a tensor, of which a complex one has two; 0 for an empty one."""
    if tensor is None or not tensor.numel():
        return 0.0
    return float(_numbers(tensor).abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host; of a complex one real and imaginary parts, which are rounded each by itself."""
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return _real(tensor).double()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = _real(tensor)
    if not tensor.dtype.is_floating_point:
        return tensor
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.dtype.itemsize])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityReport:
    """Every difference of a comparison.

    Attributes:
        title: What was compared, in one line.
        steps: How many steps both sides made.
        differences: One per tensor and step, in the order in which steps make them.
        introduced_by: With `bisect=True`, the pass after which the two differ for the first time; "capture" if they
            differ before any pass. `None` where they are equal, or without `bisect`.
    """

    title: str
    level: str
    steps: int
    differences: tuple[Difference, ...]
    introduced_by: str | None = None

    @property
    def equal(self) -> bool:
        """Whether nothing exceeds the level."""
        return self.first is None

    @property
    def first(self) -> Difference | None:
        """The first difference that the level does not allow: losses, then gradients in order of their size, ..."""
        exceeding = [d for d in self.differences if d.exceeds]
        if not exceeding:
            return None
        start = [d for d in exceeding if d.step == exceeding[0].step]
        # A loss differs because of an earlier step's parameters; within a step the largest gradient names the place.
        kinds = list(Quantity)
        kind = min((d.quantity for d in start), key=kinds.index)
        return max((d for d in start if d.quantity is kind), key=lambda d: (d.relative, d.absolute))

    def worst(self) -> list[Difference]:
        """The worst step of each tensor: what is not allowed first, then by distance in units of the last place."""
        found: dict[tuple[Quantity, str], Difference] = {}
        for d in self.differences:
            key = (d.quantity, d.name)
            if key not in found or _rank(d) > _rank(found[key]):
                found[key] = d
        return sorted(found.values(), key=_rank, reverse=True)

    def to_json(self) -> str:
        """Everything; infinities are `null`."""
        first = self.first
        content = {
            "title": self.title,
            "level": self.level,
            "steps": self.steps,
            "equal": self.equal,
            "first": None if first is None else _as_dict(first),
            "introduced_by": self.introduced_by,
            "differences": [_as_dict(d) for d in self.differences],
        }
        return json.dumps(content, indent=2)

    def parts(self) -> Iterator[RenderableType]:
        """What is shown, in order: two tables, and one sentence."""
        yield f"{self.title}\n"
        yield self._kinds().text()
        if any(d.different for d in self.differences):
            yield self._worst().text()
        first = self.first
        if first is None:
            how = "equal in every bit" if self.level == "bitwise" else "equal within the bounds"
            yield f"{how}: {len(self.differences)} tensors over {self.steps} steps"
        else:
            yield f"differ: {describe(first)}"
        if self.introduced_by is not None:
            yield f"introduced by: {self.introduced_by}"

    def __str__(self) -> str:
        return as_text(self.parts(), width=_WIDTH)

    def _kinds(self) -> Table:
        rows = []
        for quantity in Quantity:
            found = [d for d in self.differences if d.quantity is quantity]
            if found:
                worst = max(found, key=_rank)
                at = f"{worst.name}, step {worst.step}" if worst.different else ""
                differ = sum(d.different > 0 for d in found)
                rows.append((quantity.value, str(len(found)), str(differ), *_distances(worst), at))
        return Table("Largest differences", ("", "tensors ", "differ ", *_DISTANCES, "at"), rows)

    def _worst(self) -> Table:
        rows = []
        for d in [d for d in self.worst() if d.different][:_SHOWN]:
            allowed = "not judged" if math.isinf(d.bound) else f"{d.bound:.1e}"
            rows.append((d.quantity.value, d.name, str(d.step), f"{d.different}/{d.numel}", *_distances(d), allowed))
        title = "By tensor, each at its worst step, worst first"
        return Table(title, ("", "name", "step ", "differ ", *_DISTANCES, "allowed "), rows)


def describe(difference: Difference) -> str:
    """One difference in words."""
    d = difference
    return (
        f"{d.quantity.value} of {d.name} at step {d.step}: {d.different} of {d.numel} elements, "
        f"by at most {d.absolute:.3g} ({d.ulps:.3g} units in the last place of {str(d.dtype).removeprefix('torch.')}; "
        f"{d.bound:.3g} is allowed)"
    )


def _rank(d: Difference) -> tuple[bool, float, float, int]:
    return d.exceeds, d.ulps, d.absolute, d.different


def _distances(d: Difference) -> tuple[str, str, str]:
    if not d.different:
        return "0", "0", "0"
    return f"{d.absolute:.2e}", f"{d.relative:.2e}", f"{d.ulps:.3g}"


def _as_dict(d: Difference) -> dict[str, Any]:
    values = dataclasses.asdict(d) | {"dtype": str(d.dtype).removeprefix("torch."), "exceeds": d.exceeds}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
