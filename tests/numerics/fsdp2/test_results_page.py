"""The committed list of combinations is the one that the tests compare."""

from __future__ import annotations

import math

from tests.numerics.fsdp2 import test_architectures, test_matrix, test_passes
from tests.numerics.fsdp2.results import read

SECTIONS = {**test_passes.SECTIONS, **test_matrix.SECTIONS, **test_architectures.SECTIONS}


def test_the_page_lists_the_combinations_of_the_tests() -> None:
    assert {title: [row.key for row in rows] for title, rows in read().items()} == SECTIONS


def test_what_is_required_to_be_equal_was() -> None:
    for rows in read().values():
        for row in rows:
            required, largest, *_ = row.cells
            assert math.isfinite(float(largest))
            assert required == "bounds" or float(largest) == 0
