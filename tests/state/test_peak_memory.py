"""What a full save takes: rank 0 its share and the model once, others their share and less than a unit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_compile.comm.gather import MESSAGE_BYTES
from tests.sharding.test_peak_memory import MIB, WORLD_SIZE, measure

MESSAGES = 3 * MESSAGE_BYTES
"""What rank 0 receives, the copy that gloo makes of it, and this rank's part of the next one."""
NOISE = 4 * MIB
"""Pages of code that is read for the first time, and of objects."""


def check(found: list[dict[str, int]], *, blocks: int, width: int) -> None:
    unit, model = width * width * 4, blocks * width * width * 4
    for rank, peaks in enumerate(found):
        told = {name: size_bytes / MIB for name, size_bytes in peaks.items()}
        for name in ("full_params, rank 0", "full_tensors, rank 0, kept"):
            if rank == 0:
                assert model <= peaks[name] <= model + MESSAGES + NOISE, told
            else:
                assert peaks[name] <= 2 * MESSAGE_BYTES // WORLD_SIZE + NOISE, told
        assert unit <= peaks["full_tensors"] <= unit + MESSAGES + NOISE, told
        if rank == 0:
            assert unit <= peaks["full_tensors, rank 0"] <= unit + MESSAGES + NOISE, told
        else:
            assert peaks["full_tensors, rank 0"] <= 2 * MESSAGE_BYTES // WORLD_SIZE + NOISE, told


@pytest.mark.optional
@pytest.mark.skipif("FSDP_COMPILE_LARGE" not in os.environ, reason="FSDP_COMPILE_LARGE=1 gathers a model of 384 MiB")
def test_a_full_save_takes_the_model_once(tmp_path: Path) -> None:
    size = {"blocks": 6, "width": 4096}  # units larger than all messages together
    check(measure("tests.state.peak_memory", tmp_path, **size), **size)


@pytest.mark.optional
@pytest.mark.skipif("FSDP_COMPILE_LARGE" not in os.environ, reason="FSDP_COMPILE_LARGE=1 gathers a model of 1 GiB")
def test_a_full_save_of_1_gib_takes_the_model_once(tmp_path: Path) -> None:
    size = {"blocks": 16, "width": 4096}
    check(measure("tests.state.peak_memory", tmp_path, **size), **size)
