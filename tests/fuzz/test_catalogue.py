"""The package does to each awkward program what `docs/awkward_programs.md` says."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.catalogue import ROWS
from tests.fuzz.page import read
from tests.fuzz.run import Contender, run_programs
from tests.ranks import run_ranks  # noqa: F401  these tests need ranks

LONG = os.environ.get("FSDP_COMPILE_LONG", "") not in ("", "0")
_PER_CALL = 4
CALLS = [ROWS[first : first + _PER_CALL] for first in range(0, len(ROWS), _PER_CALL)]


def test_the_page_has_the_rows_of_the_catalogue() -> None:
    assert list(read()) == [row.says for row in ROWS]


@pytest.mark.parametrize("call", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, len(CALLS)))])
def test_awkward_programs_end_as_the_page_says(call: int) -> None:
    page = read()
    rows = [row for row in CALLS[call] if LONG or page[row.says].is_safe]
    outcomes = run_programs([row.text() for row in rows], Contender.HERE)
    found = [(row.says, outcome.verdict, outcome.line) for row, outcome in zip(rows, outcomes, strict=True)]
    assert [(says, verdict, line) for says, verdict, line in found if verdict is not page[says].expected] == []
