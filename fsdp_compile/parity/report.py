"""The result of a comparison: a frozen report that prints as tables, worst first."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from fsdp_compile.explain.tables import Table, as_text
from fsdp_compile.parity.compare import Difference, Quantity

_SHOWN = 12
_WIDTH = 100
_DISTANCES = ("absolute ", "relative ", "last places ")


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
                rows.append((quantity.value, str(len(found)), str(differ), *_numbers(worst), at))
        return Table("Largest differences", ("", "tensors ", "differ ", *_DISTANCES, "at"), rows)

    def _worst(self) -> Table:
        rows = []
        for d in [d for d in self.worst() if d.different][:_SHOWN]:
            allowed = "not judged" if math.isinf(d.bound) else f"{d.bound:.1e}"
            rows.append((d.quantity.value, d.name, str(d.step), f"{d.different}/{d.numel}", *_numbers(d), allowed))
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


def _numbers(d: Difference) -> tuple[str, str, str]:
    if not d.different:
        return "0", "0", "0"
    return f"{d.absolute:.2e}", f"{d.relative:.2e}", f"{d.ulps:.3g}"


def _as_dict(d: Difference) -> dict[str, Any]:
    values = dataclasses.asdict(d) | {"dtype": str(d.dtype).removeprefix("torch."), "exceeds": d.exceeds}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
