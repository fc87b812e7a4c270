"""Options, layouts and ways to train, together: FSDP2's bits, or an error by name where two contradict each other."""

from __future__ import annotations

import re

from tests import long
from tests.numerics.fsdp2.options import (
    AXES,
    FOUR_RANKS,
    NOT_DRAWN,
    OPTIONS,
    PLACEMENTS,
    SETTINGS,
    fields,
    refused,
    train,
)
from tests.pairwise import Row, covering, pairs, pairs_of, with_defaults
from tests.ranks import run_ranks

ROWS = sorted(covering(AXES, refused(), seldom=[("lower", "inductor")]), key=lambda row: row["lower"])
OF_FOUR = covering(FOUR_RANKS)


def test_every_option_is_drawn_or_left_out_for_a_reason() -> None:
    assert fields() == {*SETTINGS, *PLACEMENTS, *OPTIONS, *NOT_DRAWN}


def test_every_two_values_are_in_a_row_or_contradict_each_other() -> None:
    assert set().union(*map(pairs_of, ROWS)) == pairs(AXES) - refused().keys()


def _check(row: Row, *, world_size: int) -> None:
    assert run_ranks(train, [row], world_size=world_size) == [[""]] * world_size, row


@long.parametrize("number", range(len(ROWS)), always=[0])
def test_rows_train_to_the_bits_of_fsdp2(number: int) -> None:
    _check(ROWS[number], world_size=2)


@long.parametrize("number", range(len(OF_FOUR)), always=[0])
def test_hybrid_offloaded_and_checkpointed_rows_train_to_the_bits_of_fsdp2(number: int) -> None:
    _check(OF_FOUR[number], world_size=4)


def test_two_values_that_contradict_each_other_are_refused_by_name() -> None:
    both = sorted(refused().items(), key=lambda pair: sorted(pair[0]))
    rows = [with_defaults(AXES, pair) for pair, _ in both]
    for (_, says), row, *ends in zip(both, rows, *run_ranks(train, rows), strict=True):
        assert all(re.search(says, end) for end in ends), (row, ends)
