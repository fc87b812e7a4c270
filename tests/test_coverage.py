"""`docs/coverage.md`: each behaviour has one row, and the tests that it names exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUP_SIZES = {1: 47, 2: 43, 3: 21, 4: 61, 5: 21, 6: 15, 7: 24, 8: 23, 9: 48, 10: 17, 11: 13, 12: 48, 13: 121, 14: 36}
"""Behaviours per group."""
COMPLETE: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
"""Groups whose every id has its row."""
STATUSES = ("covered", "torch's", "different")


@dataclasses.dataclass(frozen=True)
class Row:
    id: str
    status: str
    text: str
    tests: tuple[str, ...]

    @property
    def group(self) -> int:
        return int(self.id.partition(".")[0])


@functools.cache
def rows() -> list[Row]:
    found = []
    for line in (ROOT / "docs/coverage.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(r"\d+\.\d+", cells[0]):
            assert len(cells) == 4, line
            found.append(Row(cells[0], cells[1], cells[2], tuple(re.findall(r"`([^`]+)`", cells[3]))))
    return found


def ids_without_a_row() -> list[str]:
    text = (ROOT / "docs/coverage.md").read_text()
    return re.findall(r"\d+\.\d+", text.partition("Ids without a row:")[2].partition("\n\n")[0])


@functools.cache
def functions_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_no_id_is_there_twice_and_each_is_known() -> None:
    ids = [*(row.id for row in rows()), *ids_without_a_row()]
    assert len(ids) == len(set(ids)), sorted(i for i in ids if ids.count(i) > 1)
    known = {f"{group}.{number:02}" for group, size in GROUP_SIZES.items() for number in range(1, size + 1)}
    assert set(ids) <= known, sorted(set(ids) - known)


@pytest.mark.parametrize("group", COMPLETE)
def test_every_id_of_a_group_has_a_row_or_is_said_to_have_none(group: int) -> None:
    ids = (each.split(".") for each in (*(row.id for row in rows()), *ids_without_a_row()))
    numbers = {int(number) for of_group, number in ids if int(of_group) == group}
    assert numbers == set(range(1, GROUP_SIZES[group] + 1))


def test_every_row_says_what_happens_and_how_that_is_known() -> None:
    for row in rows():
        assert row.status in STATUSES, row
        assert len(row.text) > 10, row
        assert row.tests or row.status != "covered", row


def test_every_named_test_exists() -> None:
    for row in rows():
        for test in row.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), f"{row.id}: {test}"
            assert name in functions_of(ROOT / file), f"{row.id}: {test}"
