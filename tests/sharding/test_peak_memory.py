"""From a model on meta to the end of its first step, a rank holds its share, two units, and what gloo copies.

Gloo copies each message while it is on its way: a gather or a reduction of one unit takes one unit more in gloo's own
hands (measured: an all-gather of 64 MiB on 4 ranks takes 127 MiB, a reduce-scatter of 64 MiB into 16 MiB takes 79).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 2**20
WORLD_SIZE = 4
ENOUGH_FOR_PYTHON = 12 * MIB
"""Graphs, guards and code of the second model; the first one of the process is not measured."""


def measure(folder: Path, *, blocks: int, width: int) -> list[dict[str, int]]:
    """Peaks and share of each rank, in bytes, measured in processes of their own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # so that freed units go back to the kernel, which counts
    command = [sys.executable, "-m", "tests.sharding.peak_memory"]
    ranks = [
        subprocess.Popen([*command, *map(str, (rank, WORLD_SIZE, folder, blocks, width))], cwd=ROOT, env=environment)
        for rank in range(WORLD_SIZE)
    ]
    try:
        assert [rank.wait(timeout=500) for rank in ranks] == [0] * WORLD_SIZE
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def check(found: list[dict[str, int]], *, blocks: int, width: int) -> None:
    unit = width * width * 4
    parameters = blocks * unit // WORLD_SIZE
    for rank in found:
        told = {name: size_bytes / MIB for name, size_bytes in rank.items()}
        assert rank["share"] == 2 * parameters, told
        assert rank["trained"] >= rank["share"], "the measurement saw the shards"
        assert rank["materialized"] <= parameters + 2 * unit + ENOUGH_FOR_PYTHON, told
        assert rank["trained"] <= rank["share"] + 2 * unit + unit + ENOUGH_FOR_PYTHON, told


@pytest.mark.long
def test_no_rank_ever_holds_the_model(tmp_path: Path) -> None:
    size = {"blocks": 8, "width": 2048}
    check(measure(tmp_path, **size), **size)


@pytest.mark.optional
@pytest.mark.skipif("FSDP_COMPILE_LARGE" not in os.environ, reason="FSDP_COMPILE_LARGE=1 trains a model of 2 GiB")
def test_no_rank_ever_holds_a_model_of_2_gib(tmp_path: Path) -> None:
    size = {"blocks": 32, "width": 4096}
    check(measure(tmp_path, **size), **size)
