"""What came of a case: the numbers of one process, a refusal by name, or a fault."""

from __future__ import annotations

import dataclasses
import math
import re
import traceback
from collections.abc import Iterator
from enum import StrEnum

import torch

from fsdp_compile.errors import FSDPCompileError, InvariantError
from tests.fuzz.sides import Notes


class Verdict(StrEnum):
    """From best to worst."""

    EQUAL = "equal"
    AS_FSDP2 = "as far as FSDP2"
    """From one process, in a program that computes in bfloat16: its rounding and not ours."""
    REFUSED = "refused"
    """By an error of ours that says what, where and what to write instead."""
    INVALID = "invalid"
    """One process cannot run it: a mistake of the generator."""
    CRASHED = "crashed"
    HUNG = "hung"
    WRONG = "wrong"


GOOD = (Verdict.EQUAL, Verdict.AS_FSDP2, Verdict.REFUSED)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A verdict, one line that tells faults apart, and all that is known."""

    verdict: Verdict
    line: str = ""
    details: str = ""
    # How many times what rounding allows the numbers of one process are missed by; infinite for what is no
    # number, as a gradient that one of the two has not.
    excess: float = 0.0

    def is_like(self, other: Outcome) -> bool:
        """Whether it is the same fault, for all one can tell."""
        return self.verdict is other.verdict and _shape(self.line) == _shape(other.line)


def worst(outcomes: list[Outcome]) -> Outcome:
    """That of the ranks together."""
    return max(outcomes, key=lambda outcome: list(Verdict).index(outcome.verdict))


def of_error(error: BaseException) -> Outcome:
    """The verdict on an error that a rank raised."""
    text = "".join(traceback.format_exception(error))
    for cause in _causes(error):
        if isinstance(cause, FSDPCompileError):
            line = f"{type(cause).__name__}: {cause.what}"
            named = cause.where is not None and cause.instead is not None and not isinstance(cause, InvariantError)
            return Outcome(Verdict.REFUSED if named else Verdict.CRASHED, _one_line(line), text)
    return Outcome(Verdict.CRASHED, _one_line(f"{type(error).__name__}: {error}"), text)


def of_notes(mine: Notes, exact: Notes, single: Notes, *, slack: float = 1e-5) -> Outcome:
    """Compares what a rank noted with one process in float64; one process in the case's dtype says how near is near."""
    endless = [name for name, value in exact.items() if value is not None and not value.isfinite().all()]
    if endless:
        return Outcome(Verdict.INVALID, f"{endless[0]} is not finite in one process")
    found = list(_differences(mine, exact, single, slack))
    if not found:
        return Outcome(Verdict.EQUAL)
    lines = [line for line, _ in found]
    return Outcome(Verdict.WRONG, lines[0], "\n".join(lines[:20]), max(excess for _, excess in found))


def _differences(mine: Notes, exact: Notes, single: Notes, slack: float) -> Iterator[tuple[str, float]]:
    """Names and distances of what differs, and how many times more than is allowed."""
    for name, value in mine.items():
        if name not in exact:
            yield name, math.inf
            continue
        theirs, near = exact[name], single[name]
        if value is None or theirs is None or near is None:
            if (value is None) != (theirs is None):
                yield f"{name}: {_kind(value)} instead of {_kind(theirs)}", math.inf
            continue
        scale = max(1.0, theirs.abs().max().item() if theirs.numel() else 0.0)
        allowed = slack * scale + 20 * _distance(near, theirs)
        distance = _distance(value, theirs)
        if not distance <= allowed:
            excess = distance / allowed if math.isfinite(distance) else math.inf
            yield f"{name}: differs by {distance:.2g}, and {allowed:.2g} is rounding", excess


def _kind(value: torch.Tensor | None) -> str:
    if value is None:
        return "None"
    return "zeros" if not value.any() else "a value"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    return (a.to(wide) - b.to(wide)).abs().max().item() if a.numel() else 0.0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _shape(line: str) -> str:
    """A line without what differs between cases."""
    line = re.sub(r" of (?=[a-z]\w*[.\d])[\w.]+|parameter [\w.]+|buffer [\w.]+", "", line)
    return re.sub(r"\d[\d.e+-]*", "#", line)[:80]
