"""The package does to each awkward program what `docs/limits.md` says."""

from __future__ import annotations

import os

from tests import long
from tests.fuzz.catalogue import ROWS
from tests.fuzz.page import read
from tests.fuzz.run import PER_CALL, run_programs
from tests.fuzz.verdict import Verdict
from tests.ranks import run_ranks  # noqa: F401  these tests need ranks

LONG = os.environ.get("FSDP_COMPILE_LONG", "") not in ("", "0")
CALLS = [ROWS[first : first + PER_CALL] for first in range(0, len(ROWS), PER_CALL)]


def test_the_page_has_the_rows_of_the_catalogue() -> None:
    assert list(read()) == [row.says for row in ROWS]


@long.parametrize("call", range(len(CALLS)), always=[0, 4, 7])
def test_awkward_programs_end_as_the_page_says(call: int) -> None:
    expected = read()
    rows = [row for row in CALLS[call] if LONG or expected[row.says] is not Verdict.HUNG]  # that takes long
    outcomes = run_programs([row.text() for row in rows])
    found = [(row.says, outcome.verdict, outcome.line) for row, outcome in zip(rows, outcomes, strict=True)]
    assert [(says, verdict, line) for says, verdict, line in found if verdict is not expected[says]] == []
