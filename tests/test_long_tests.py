"""Shares of the long tests: each of them is in one, whatever the number of shares; and which cases are long."""

from __future__ import annotations

import pytest

from tests import long
from tests.conftest import is_left_out

NAMES = [f"tests/test_some.py::test[{number}]" for number in range(100)]


def _left(setting: str) -> list[str]:
    return [name for name in NAMES if not is_left_out(name, setting)]


@pytest.mark.parametrize("shares", [1, 8])
def test_every_long_test_is_in_one_share(shares: int) -> None:
    found = [_left(f"{number}/{shares}") for number in range(1, shares + 1)]
    assert sorted(name for share in found for name in share) == sorted(NAMES)
    assert all(found)


def test_all_or_none_without_shares() -> None:
    assert _left("1") == NAMES
    assert _left("0") == _left("") == []


def test_cases_that_not_every_run_has_are_marked() -> None:
    mark = long.parametrize(("a", "b"), [(1, 2), (3, 4)], always=[(3, 4)], ids=["first", "second"]).mark
    names, (left, kept) = mark.args
    assert (names, kept, mark.kwargs) == (("a", "b"), (3, 4), {"ids": ["first", "second"]})
    assert left.values == (1, 2)
    assert [each.name for each in left.marks] == ["long"]
    assert long.parametrize("shape", [(2,), (2, 2)], always=[(2, 2)]).mark.args[1][0].values == ((2,),)


def test_a_case_that_there_is_not_cannot_be_in_every_run() -> None:
    with pytest.raises(AssertionError, match="not all among"):
        long.parametrize("name", ["stack"], always=["stak"])
