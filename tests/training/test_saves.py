"""Checkpoints that a thread writes while training goes on: the same files, the same failures, on all ranks."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile._torch.distributed import timeout_of
from fsdp_compile.errors import CheckpointError
from fsdp_compile.formats.dcp import SafeReader
from fsdp_compile.formats.files import FileDigest
from fsdp_compile.training.checkpoint import Saves
from fsdp_compile.training.checkpoint_folder import CheckpointFolder
from tests.ranks import run_ranks
from tests.training.small_run import SmallRun, full_disk, load, names


def _files(checkpoint: Path) -> dict[str, Any]:
    """Contents of shards, and of metadata but for what names the save."""
    metadata = SafeReader(checkpoint).read_metadata()
    metadata.storage_meta = None
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")} | {"metadata": metadata}


def _save_both_ways(folder: Path) -> None:
    run = SmallRun(folder / "waits")
    for step in (1, 2, 3):
        run.step_and_save(step)
        run.overwrite()
    run = SmallRun(folder / "goes on")
    saves = run.saves()
    for step in (1, 2, 3):
        run.step(step)
        run.save_and_overwrite(step, saves)
    saves.wait()


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_are_those_of_a_save_that_training_waits_for(ranks: int, tmp_path: Path) -> None:
    run_ranks(_save_both_ways, tmp_path, world_size=ranks)
    one, other = tmp_path / "waits", tmp_path / "goes on"
    assert names(one) == names(other) == ["step-000002", "step-000003"]
    for name in names(one):
        assert _files(one / name) == _files(other / name)
    assert run_ranks(load, other) == [(3, {3.0}, [])] * 2


@contextmanager
def _held_back() -> Iterator[threading.Event]:
    """No save of this process gets beyond its begin until the event is set."""
    go_on = threading.Event()
    begin: Callable[[CheckpointFolder], None] = CheckpointFolder.begin

    def wait_and_begin(self: CheckpointFolder) -> None:
        assert go_on.wait(100)
        begin(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "begin", wait_and_begin)
        yield go_on


def _go_on_meanwhile(folder: Path) -> list[list[str]]:
    run = SmallRun(folder)
    saves = run.saves()
    seen: list[list[str]] = []
    with _held_back() as go_on:
        run.step(1)
        run.save_and_overwrite(1, saves)
        for number in range(50):  # collectives of training, while the other group waits for rank 0
            total = torch.tensor(number)
            dist.all_reduce(total)
            assert total == 2 * number
            saves.poll()
        seen.append(names(folder) if folder.exists() else [])
        run.step(2)
        # Rank 0 alone is held back; the second save of both begins when the first is complete.
        timer = threading.Timer(0.3, go_on.set)
        timer.start()
        run.save_and_overwrite(2, saves)
        seen.append([name for name in names(folder) if name == "step-000001"])
        saves.close()
        seen.append(names(folder))
        saves.wait()
    return seen


def test_training_goes_on_meanwhile_and_the_next_save_waits(tmp_path: Path) -> None:
    checkpoints = ["step-000001", "step-000002"]
    assert run_ranks(_go_on_meanwhile, tmp_path / "run") == [[[], ["step-000001"], checkpoints]] * 2
    assert run_ranks(load, tmp_path / "run") == [(2, {2.0}, [])] * 2


def _fail_and_go_on(folder: Path) -> list[tuple[str, int]]:
    """Saves of which the second and third fail: what was raised, and in which step of training."""
    run = SmallRun(folder)
    saves = run.saves()
    run.step_and_save(1)
    with full_disk("__1_0.distcp"):
        run.step(2)
        run.save_and_overwrite(2, saves)
        raised = [_train_until_failure(saves)]
        run.step(3)
        run.save_and_overwrite(3, saves)
        with pytest.raises(CheckpointError) as caught:
            run.save_and_overwrite(4, saves)
        raised.append((str(caught.value), 0))
    run.step(5)
    run.save_and_overwrite(5, saves)
    saves.wait()
    return raised


def _train_until_failure(saves: Saves) -> tuple[str, int]:
    for step in itertools.count():
        total = torch.tensor(step)
        dist.all_reduce(total)
        assert total == 2 * step, "ranks are in the same step"
        try:
            saves.poll()
        except CheckpointError as error:
            return str(error), step
    raise AssertionError


def test_a_failure_is_raised_in_the_same_step_on_all_ranks_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    first, second = run_ranks(_fail_and_go_on, tmp_path)
    assert first == second
    full = f"rank 1 cannot write {tmp_path}/.partial/__1_0.distcp: {os.strerror(errno.ENOSPC)}"
    complete = f"\n  instead: go on from {tmp_path}/step-000001, which is complete"
    assert [message for message, _ in first] == [f"{full}\n  where: step {step}{complete}" for step in (2, 3)]
    assert names(tmp_path) == ["step-000001", "step-000005"]
    assert run_ranks(load, tmp_path) == [(5, {5.0}, [])] * 2


def _break_one_rank(folder: Path) -> str:
    run = SmallRun(folder)
    saves = run.saves()
    run.step(1)
    with pytest.MonkeyPatch.context() as patch:
        if run.world.rank == 1:
            patch.setattr(FileDigest, "of", lambda _path: 1 / 0)
        saves.save(1, run.model, run.optimizer)
        raised, _ = _train_until_failure(saves)
    return raised


def test_a_bug_of_one_rank_ends_all(tmp_path: Path) -> None:
    said = f"rank 1 cannot write {tmp_path}/.partial: ZeroDivisionError: division by zero\n  where: step 1"
    assert run_ranks(_break_one_rank, tmp_path) == [said] * 2


def _timeout_of_saves(folder: Path) -> float:
    saves = SmallRun(folder).saves()
    assert saves._group is not None
    return timeout_of(saves._group).total_seconds()


def test_threads_wait_for_each_other_as_long_as_training_does(tmp_path: Path) -> None:
    assert run_ranks(_timeout_of_saves, tmp_path, timeout_s=77.0) == [77.0, 77.0]
