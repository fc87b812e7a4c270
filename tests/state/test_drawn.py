"""What one layout saves is loaded by another one, bit for bit, and training goes on: any two values of axes meet."""

from __future__ import annotations

from pathlib import Path

from tests import long
from tests.pairwise import covering, pairs, pairs_of
from tests.ranks import run_ranks
from tests.state.drawn import AXES, contradictions, load, save, world

ROWS = covering(AXES, contradictions())
WORLDS = sorted({(world(row), world(row, " then")) for row in ROWS})


def test_every_two_values_are_in_a_row_or_contradict_each_other() -> None:
    assert set().union(*map(pairs_of, ROWS)) == pairs(AXES) - contradictions()


@long.parametrize("worlds", WORLDS, always=[(2, 4)])
def test_what_is_saved_is_loaded_by_another_layout(worlds: tuple[int, int], tmp_path: Path) -> None:
    rows = [row for row in ROWS if (world(row), world(row, " then")) == worlds]
    saved, *_ = run_ranks(save, rows, tmp_path, world_size=worlds[0])
    ends = run_ranks(load, rows, tmp_path, saved, world_size=worlds[1])
    assert [(row, said) for row, *said in zip(rows, *ends, strict=True) if any(said)] == []
