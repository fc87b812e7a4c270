"""`python -m tests.faults --runs 20`: each fault of docs/faults.md that ends a job, so many times, as a table."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.listed import FAULTS, Fault, Start
from tests.faults.run import ENDS_WITHIN_S, Outcome, run


def row(fault: Fault, outcomes: Sequence[Outcome]) -> str:
    """The line of a fault in the table."""
    in_time = sum(outcome.is_in_time for outcome in outcomes)
    named = sum(outcome.named for outcome in outcomes)
    measured = [outcome.ended_s for outcome in outcomes if outcome.ended_s is not None]
    slowest = f"{max(measured):.1f} s" if len(measured) == len(outcomes) else "not ended"
    of = f"of {len(outcomes)}"
    return f"| {fault.name} | {fault.way} | {fault.start} | {in_time} {of} | {slowest} | {named} {of} |"


def main() -> int:
    """Prints a line for each fault, after its last run; 1 if a run has not ended in time, or not said why."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of each fault (default: 1)")
    parser.add_argument("--fault", action="append", default=[], help="a fault by its name; may be given repeatedly")
    parser.add_argument("--start", action="append", default=[], choices=[each.value for each in Start], help="the same")
    parser.add_argument("--outputs", type=Path, metavar="FOLDER", help="keeps what runs have printed that went wrong")
    arguments = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if fault.name in (arguments.fault or [fault.name]) and fault.start in (arguments.start or [fault.start])
    ]
    print(f"| fault | model | started by | ended within {ENDS_WITHIN_S:g} s | slowest | cause named |")
    print("|---|---|---|---|---|---|", flush=True)
    wrong = 0
    for fault in chosen:
        outcomes = list(_runs(fault, arguments.runs))
        print(row(fault, outcomes), flush=True)
        for number, outcome in enumerate(outcomes):
            if not (outcome.is_in_time and outcome.named):
                wrong += 1
                _keep(outcome, arguments.outputs, f"{fault}-{number}".replace(" ", "-").replace(",", ""))
    print(f"{len(chosen) * arguments.runs - wrong} of {len(chosen) * arguments.runs} runs ended in time and said why")
    return 1 if wrong else 0


def _runs(fault: Fault, count: int) -> Iterator[Outcome]:
    for _ in range(count):
        with tempfile.TemporaryDirectory(prefix="fsdp-compile-fault-") as folder:
            yield run(fault, Path(folder))


def _keep(outcome: Outcome, folder: Path | None, name: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{outcome.output}\nended after {outcome.ended_s} s, failed: {outcome.failed}\n")


if __name__ == "__main__":
    sys.exit(main())
