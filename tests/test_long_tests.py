"""Shares of the long tests: each of them is in one, whatever the number of shares."""

from __future__ import annotations

import pytest

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
