"""What a full save takes: rank 0 its share and the model once, others their share and a parameter at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sharding.test_peak_memory import MIB, measure

NOISE = 4 * MIB
"""Pages of code that is read for the first time, and of objects."""


def check(found: list[dict[str, int]], *, blocks: int, width: int) -> None:
    # A unit is one parameter, which torch gathers in one message.
    unit, model = width * width * 4, blocks * width * width * 4
    for rank, peaks in enumerate(found):
        told = {name: size_bytes / MIB for name, size_bytes in peaks.items()}
        for name in ("full_params, rank 0", "full_tensors, rank 0, kept"):
            if rank == 0:
                assert model <= peaks[name] <= model + unit + NOISE, told
            else:
                assert peaks[name] <= 2 * unit + NOISE, told
        assert unit <= peaks["full_tensors"] <= 2 * unit + NOISE, told
        assert peaks["full_tensors, rank 0"] <= 2 * unit + NOISE, told


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
