"""What grows over models and worlds that are made and dropped is named; a short run has nothing that grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import soak


def _rounds(**last: float) -> list[dict[str, float]]:
    flat = dict.fromkeys(soak.COUNTS, 5) | {"memory_mb": 400.0}
    return [*([flat] * 7), flat | last]


def test_what_grows_is_named() -> None:
    assert soak.grown(_rounds()) == []
    assert soak.grown(_rounds(threads=6)) == ["threads went from 5 to 6"]
    assert soak.grown(_rounds(graph_modules=11, meshes=4)) == ["graph_modules went from 5 to 11"]
    filling = [{**row, "threads": number} for number, row in enumerate(_rounds())]
    assert soak.grown(filling) == ["threads went from 2 to 7"], "the first rounds do not count"


def test_memory_may_grow_by_a_share() -> None:
    for mb_per_round, problems in ((0.5, 0), (5.0, 1)):
        rounds = [{**row, "memory_mb": 400 + number * mb_per_round} for number, row in enumerate(_rounds())]
        assert len(soak.grown(rounds)) == problems


@pytest.mark.long
def test_nothing_is_left_of_models_and_worlds(tmp_path: Path) -> None:
    assert soak.main(["--smoke", "--out", str(tmp_path / "soak.json")]) == 0
    assert len(json.loads((tmp_path / "soak.json").read_text())["results"]) == 4
