"""Options, layouts and ways to train, together: FSDP2's bits, or an error by name where two contradict each other."""

from __future__ import annotations

import itertools
import re

from tests import long
from tests.numerics.fsdp2.options import (
    AXES,
    NOT_DRAWN,
    OPTIONS,
    SETTINGS,
    covering,
    fields,
    refused,
    train,
    with_defaults,
)
from tests.ranks import run_ranks

ROWS, PER_CALL = covering(), 6
CALLS = range(0, len(ROWS), PER_CALL)


def test_every_option_is_drawn_or_left_out_for_a_reason() -> None:
    assert fields() == {*SETTINGS, *OPTIONS, *NOT_DRAWN}


def test_every_two_values_are_in_a_row_or_contradict_each_other() -> None:
    found = {frozenset(pair) for row in ROWS for pair in itertools.combinations(row.items(), 2)}
    values = [[(axis, value) for value in AXES[axis]] for axis in AXES]
    every = {frozenset(pair) for a, b in itertools.combinations(values, 2) for pair in itertools.product(a, b)}
    assert found == every - refused().keys()


@long.parametrize("first", CALLS, always=[0])
def test_rows_train_to_the_bits_of_fsdp2(first: int) -> None:
    rows = ROWS[first : first + PER_CALL]
    ends = zip(rows, *run_ranks(train, rows), strict=True)
    assert [(row, said) for row, *said in ends if any(said)] == []


def test_two_values_that_contradict_each_other_are_refused_by_name() -> None:
    pairs = sorted(refused().items(), key=lambda pair: sorted(pair[0]))
    rows = [with_defaults(pair) for pair, _ in pairs]
    for (_, says), row, *ends in zip(pairs, rows, *run_ranks(train, rows), strict=True):
        assert all(re.search(says, end) for end in ends), (row, ends)
