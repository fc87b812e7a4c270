"""The simplest case that fails as a given one does."""

from __future__ import annotations

from tests.fuzz.draw import simpler
from tests.fuzz.program import Case
from tests.fuzz.run import run_programs
from tests.fuzz.verdict import Outcome


def shrink(case: Case, outcome: Outcome, *, at_most: int = 60) -> tuple[Case, Outcome]:
    """Takes the first simpler case that fails alike, again and again.

    Args:
        case: One that fails.
        outcome: How.
        at_most: How many cases to run.
    """
    tried = {case}
    while True:
        left = [other for other in simpler(case) if other not in tried]
        for other in left:
            if len(tried) > at_most:
                return case, outcome
            tried.add(other)
            found = next(run_programs([other.text()]))
            if found.is_like(outcome):
                case, outcome = other, found
                break
        else:
            return case, outcome
