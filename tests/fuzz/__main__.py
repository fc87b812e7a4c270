"""`python -m tests.fuzz --seconds 28800 --seed 1000`: a night of fuzzed programs; each failure as a short program."""

from __future__ import annotations

import argparse
import collections
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import page
from tests.fuzz.draw import draw, shrink
from tests.fuzz.program import Case
from tests.fuzz.run import PER_CALL, Contender, run_programs
from tests.fuzz.verdict import GOOD, Outcome, Verdict
from tests.ranks import close_pool


def fuzz(seeds: range, seconds: float = math.inf) -> Iterator[tuple[int, Outcome]]:
    """Cases of some seeds with their outcomes, until the time is over."""
    end_s = time.monotonic() + seconds
    while seeds and time.monotonic() < end_s:
        now, seeds = seeds[:PER_CALL], seeds[PER_CALL:]
        yield from zip(now, run_programs([draw(seed).text() for seed in now]), strict=True)


def report(case: Case, outcome: Outcome) -> str:
    """A failing case as a program to paste, with what else is known."""
    text = case.text()
    others = [f"{name}: {_said(next(run_programs([text], name)))}" for name in (Contender.AOT, Contender.FSDP2)]
    return "\n".join([f"{_said(outcome)}", *others, "", text, "", outcome.details])


def _said(outcome: Outcome) -> str:
    return f"{outcome.verdict} {outcome.line}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to draw cases; shrinking comes on top")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--case", type=int, help="run the case of this seed alone")
    parser.add_argument("--program", type=Path, help="run a program of such a report")
    parser.add_argument("--catalogue", action="store_true", help="measure the catalogue, and write its page")
    parser.add_argument("--no-shrink", action="store_false", dest="shrink", help="show cases as they were drawn")
    arguments = parser.parse_args()
    try:
        if arguments.catalogue:
            page.write()
        elif arguments.program is not None:
            text = arguments.program.read_text()
            for contender in Contender:
                outcome = next(run_programs([text], contender))
                print(f"{contender}: {_said(outcome)}\n{outcome.details}")
        elif arguments.case is not None:
            case = draw(arguments.case)
            outcome = next(run_programs([case.text()]))
            if arguments.shrink and outcome.verdict not in GOOD:
                case, outcome = shrink(case, outcome)
            print(report(case, outcome))
        else:
            _run(arguments.seed, arguments.seconds, shrinks=arguments.shrink)
    finally:
        close_pool()


def _run(first: int, seconds: float, *, shrinks: bool) -> None:
    counts: collections.Counter[Verdict] = collections.Counter()
    failed: list[tuple[int, Outcome]] = []
    for seed, outcome in fuzz(range(first, sys.maxsize), seconds):
        counts[outcome.verdict] += 1
        if outcome.verdict is not Verdict.EQUAL:
            print(f"seed {seed}: {_said(outcome)}", flush=True)
        if outcome.verdict not in GOOD and not any(outcome.is_like(other) for _, other in failed):
            failed.append((seed, outcome))
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict), flush=True)
    for seed, outcome in failed:
        case, smallest = shrink(draw(seed), outcome) if shrinks else (draw(seed), outcome)
        print(f"\n{'=' * 100}\nseed {seed}\n{report(case, smallest)}", flush=True)


if __name__ == "__main__":
    main()
