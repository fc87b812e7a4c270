"""`python -m tests.faults --runs 20`: each fault of docs/faults.md that ends a job, so many times, as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faults.listed import FAULTS, Fault, Start
from tests.faults.run import ENDS_WITHIN_S, Outcome, run

Outcomes = dict[str, list[Outcome]]
"""By `str(fault)`, in the order in which they were run."""


def row(fault: Fault, outcomes: Sequence[Outcome]) -> str:
    """The line of a fault in the table."""
    in_time = sum(outcome.is_in_time for outcome in outcomes)
    named = sum(outcome.named for outcome in outcomes)
    measured = [outcome.ended_s for outcome in outcomes if outcome.ended_s is not None]
    slowest = f"{max(measured):.1f} s" if len(measured) == len(outcomes) else "not ended"
    of = f"of {len(outcomes)}"
    return f"| {fault.name} | {fault.start} | {in_time} {of} | {slowest} | {named} {of} |"


def load(file: Path) -> Outcomes:
    """The outcomes in a file, without what the runs have printed; none if it does not exist."""
    if not file.exists():
        return {}
    known = json.loads(file.read_text())
    return {fault: [Outcome(**one, output="") for one in outcomes] for fault, outcomes in known.items()}


def save(file: Path, outcomes: Outcomes) -> None:
    """Writes outcomes where `load` finds them."""
    lines = []
    for fault, runs in outcomes.items():
        kept = [dataclasses.asdict(one) for one in runs]
        for one in kept:
            del one["output"]
            one["ended_s"] = None if one["ended_s"] is None else round(one["ended_s"], 2)
        lines.append(f"{json.dumps(fault)}: {json.dumps(kept)}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    written = file.with_name(f"{file.name}.new")
    written.write_text(text)
    written.replace(file)


def main() -> int:
    """Runs all chosen faults once, then again, and prints a line for each; 1 if some was late, or not named."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of each fault (default: 1)")
    parser.add_argument("--fault", action="append", default=[], help="a fault by its name; may be given repeatedly")
    parser.add_argument("--start", action="append", default=[], choices=[each.value for each in Start], help="the same")
    parser.add_argument("--outputs", type=Path, metavar="FOLDER", help="keeps what runs have printed that went wrong")
    parser.add_argument(
        "--add-to", type=Path, metavar="FILE",
        help="of outcomes (JSON): faults that have fewer than N there are run, each is added to it when it has ended, "
        "and the table is of all",
    )  # fmt: skip
    arguments = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if fault.name in (arguments.fault or [fault.name]) and fault.start in (arguments.start or [fault.start])
    ]
    outcomes = load(arguments.add_to) if arguments.add_to is not None else {}
    for number in range(arguments.runs):
        for fault in chosen:
            known = outcomes.setdefault(str(fault), [])
            if len(known) > number:
                continue
            with tempfile.TemporaryDirectory(prefix="fsdp-compile-fault-") as folder:
                known.append(run(fault, Path(folder)))
            print(f"{number + 1}: {row(fault, known[-1:])}", file=sys.stderr, flush=True)
            if not _is_good(known[-1]) and arguments.outputs is not None:
                arguments.outputs.mkdir(parents=True, exist_ok=True)
                kept = arguments.outputs / f"{fault}-{number}".replace(" ", "-").replace(",", "")
                kept.write_text(f"{known[-1].output}\nended after {known[-1].ended_s} s\n")
            if arguments.add_to is not None:
                save(arguments.add_to, outcomes)
    return _print(chosen, outcomes)


def _print(chosen: Sequence[Fault], outcomes: Outcomes) -> int:
    print(f"| fault | started by | ended within {ENDS_WITHIN_S:g} s | slowest | cause named |")
    print("|---|---|---|---|---|")
    for fault in chosen:
        print(row(fault, outcomes[str(fault)]))
    counted = [_is_good(outcome) for fault in chosen for outcome in outcomes[str(fault)]]
    print(f"{sum(counted)} of {len(counted)} runs ended in time and said why")
    return 0 if all(counted) else 1


def _is_good(outcome: Outcome) -> bool:
    return outcome.is_in_time and outcome.named


if __name__ == "__main__":
    sys.exit(main())
