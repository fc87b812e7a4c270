"""What is said when a rank fails, and after how long all ranks have ended: the table of docs/faults.md."""

from __future__ import annotations

from pathlib import Path

from tests import long
from tests.faults.__main__ import row
from tests.faults.listed import FAULTS, Fault, Start
from tests.faults.run import ENDS_WITHIN_S, Outcome, run

OF_A_LAUNCHER = ("raises first", "killed later", "stopped later", "other setting", "leaves a step out", "NAN_AT")
"""One of each kind; `python -m tests.faults` has them all, and tests/training/test_command.py those of our command."""
RUN = [f for f in FAULTS if f.start is Start.ALONE or f.name in OF_A_LAUNCHER]
ALWAYS = [f for f in FAULTS if (f.name, f.start) == ("killed later", Start.ALONE)]


@long.parametrize("fault", RUN, always=ALWAYS, ids=str)
def test_all_ranks_end_within_the_timeout_and_the_cause_is_named(fault: Fault, tmp_path: Path) -> None:
    outcome = run(fault, tmp_path)
    print(outcome.output, f"\n{fault}: ended after {outcome.ended_s} s")
    assert outcome.named
    # `python -m tests.faults` counts who is within 5 s of the timeout; a machine that runs other tests may be slower.
    # Here all end by themselves, long before torch's own timeout.
    assert outcome.failed
    assert outcome.ended_s is not None


def test_a_row_counts_what_ended_in_time_and_what_was_named() -> None:
    late = Outcome(ENDS_WITHIN_S + 1, failed=True, named=True, output="")
    good = Outcome(3.04, failed=True, named=False, output="")
    went_on = Outcome(1.0, failed=False, named=True, output="")
    assert row(ALWAYS[0], [good, late, went_on]).endswith("| 1 of 3 | 16.0 s | 2 of 3 |")
    killed = Outcome(None, failed=True, named=True, output="")
    assert row(ALWAYS[0], [good, killed]).endswith("| 1 of 2 | not ended | 1 of 2 |")
