"""What the comparisons share: the page of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from fsdp_compile.parity.compare import Difference
from tests.numerics.fsdp2.results import Judge, Row, update


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Judge:
    """`judge(section, all its keys, key, differences)` fails for what is not equal, and writes the page if asked."""

    def judge(section: str, keys: Iterable[str], key: str, found: Sequence[Difference]) -> None:
        assert found
        assert [one for one in found if one.exceeds] == []
        if request.config.getoption("--update-parity-results"):
            update(section, keys, Row.of(key, found))

    return judge
