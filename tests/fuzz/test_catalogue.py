"""The package does to each awkward program what `docs/limits.md` says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import long
from tests.fuzz import page
from tests.fuzz.catalogue import ROWS
from tests.fuzz.page import read
from tests.fuzz.row import Row
from tests.fuzz.run import Contender, run_programs
from tests.ranks import run_ranks  # noqa: F401  these tests need ranks

LONG = os.environ.get("FSDP_COMPILE_LONG", "") not in ("", "0")
_PER_CALL = 8
CALLS = [ROWS[first : first + _PER_CALL] for first in range(0, len(ROWS), _PER_CALL)]


def test_the_page_has_the_rows_of_the_catalogue() -> None:
    assert list(read()) == [row.says for row in ROWS]


def test_what_was_measured_before_an_interruption_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before, written = read(), tmp_path / "page.md"
    written.write_text(page.PAGE.read_text())
    calls: list[str] = []

    def measure(rows: list[Row], contender: Contender) -> list[str]:
        calls.append(contender)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return [f"refused: by {contender}" for _ in rows]

    monkeypatch.setattr(page, "PAGE", written)
    monkeypatch.setattr(page, "measured", measure)
    with pytest.raises(KeyboardInterrupt):
        page.write()
    lines = list(read().values())
    assert {line.fsdp2 for line in lines[:8]} == {f"refused: by {Contender.FSDP2}"}
    assert lines[8:] == list(before.values())[8:]


@long.parametrize("call", range(len(CALLS)), always=[0, 4, 7])
def test_awkward_programs_end_as_the_page_says(call: int) -> None:
    lines = read()
    rows = [row for row in CALLS[call] if LONG or lines[row.says].is_safe]
    outcomes = run_programs([row.text() for row in rows], Contender.HERE)
    found = [(row.says, outcome.verdict, outcome.line) for row, outcome in zip(rows, outcomes, strict=True)]
    assert [(says, verdict, line) for says, verdict, line in found if verdict is not lines[says].expected] == []
