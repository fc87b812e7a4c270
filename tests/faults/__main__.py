"""`python -m tests.faults --runs 20`: each fault of docs/faults.md that ends a job, so many times, as a table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.listed import FAULTS, Fault, Start
from tests.faults.run import ENDS_WITHIN_S, Outcome, run


def row(fault: Fault, outcomes: Sequence[Outcome]) -> str:
    in_time = sum(outcome.is_in_time for outcome in outcomes)
    named = sum(outcome.named for outcome in outcomes)
    measured = [outcome.ended_s for outcome in outcomes if outcome.ended_s is not None]
    slowest = f"{max(measured):.1f} s" if len(measured) == len(outcomes) else "not ended"
    of = f"of {len(outcomes)}"
    return f"| {fault.name} | {fault.start} | {in_time} {of} | {slowest} | {named} {of} |"


def main() -> int:
    """Runs all chosen faults once, then again, and prints a line for each; 1 if some was late, or not named."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of each fault (default: 1)")
    parser.add_argument("--fault", action="append", default=[], help="a fault by its name; may be given repeatedly")
    parser.add_argument("--start", action="append", default=[], choices=[each.value for each in Start], help="the same")
    parser.add_argument("--outputs", type=Path, metavar="FOLDER", help="keeps what runs have printed that went wrong")
    arguments = parser.parse_args()
    outcomes: dict[Fault, list[Outcome]] = {
        fault: []
        for fault in FAULTS
        if fault.name in (arguments.fault or [fault.name]) and fault.start in (arguments.start or [fault.start])
    }
    for number in range(arguments.runs):
        for fault, known in outcomes.items():
            with tempfile.TemporaryDirectory(prefix="fsdp-compile-fault-") as folder:
                outcome = run(fault, Path(folder))
            known.append(outcome)
            print(f"{number + 1}: {row(fault, [outcome])}", file=sys.stderr, flush=True)
            if not outcome.is_good and arguments.outputs is not None:
                arguments.outputs.mkdir(parents=True, exist_ok=True)
                name = f"{fault}-{number}".replace(" ", "-").replace(",", "")
                (arguments.outputs / name).write_text(f"{outcome.output}\nended after {outcome.ended_s} s\n")
    print(f"| fault | started by | ended within {ENDS_WITHIN_S:g} s | slowest | cause named |")
    print("|---|---|---|---|---|")
    for fault, known in outcomes.items():
        print(row(fault, known))
    counted = [outcome.is_good for known in outcomes.values() for outcome in known]
    print(f"{sum(counted)} of {len(counted)} runs ended in time and said why")
    return 0 if all(counted) else 1


if __name__ == "__main__":
    sys.exit(main())
