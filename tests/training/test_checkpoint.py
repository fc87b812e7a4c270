"""Checkpoints that are whole or not there, whatever happens while one is written; and what is kept."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.formats.files import MARKER
from fsdp_compile.training.checkpoint_folder import CheckpointFolder
from tests import long
from tests.ranks import on_ranks, run_ranks
from tests.training.small_run import SmallRun, full_disk, load, names


class Crash(Exception):  # noqa: N818 (it stands for a power cut)
    """The process ends here."""


def _save(folder: Path, *steps: int, keep: int = 1, run: str = "this run") -> list[str]:
    SmallRun(folder, run).step_and_save(*steps, keep=keep)
    return names(folder)


def _crash_in_the_second_save(folder: Path, renamed: str) -> list[str]:
    """Save a second time, up to where the file or folder `renamed` would get its final name."""
    run = SmallRun(folder)
    run.step_and_save(1)
    rename: Callable[[Path, Path], Path] = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self.name.startswith(renamed):
            raise Crash
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        patch.setattr("shutil.rmtree", lambda *_args, **_kwargs: None)  # nothing is tidied up after a power cut
        with pytest.raises((Crash, CheckpointError, FileExistsError)):
            run.step_and_save(2)
    return names(folder)


def test_new_checkpoints_take_the_places_of_the_oldest(tmp_path: Path) -> None:
    assert run_ranks(_save, tmp_path, 1, 2) == [["step-000002"]] * 2
    assert run_ranks(load, tmp_path) == [(2, {2.0}, [])] * 2
    assert run_ranks(_save, tmp_path, 3, 4, keep=2) == [["step-000003", "step-000004"]] * 2
    # What was just written is never one too many, whatever there is of later steps.
    assert run_ranks(_save, tmp_path, 1, 2) == [["step-000002", "step-000003", "step-000004"]] * 2


@pytest.mark.parametrize("renamed", [".metadata", ".partial"])  # torch's last file, then our folder
def test_the_old_checkpoint_stays_until_the_new_one_is_whole(tmp_path: Path, renamed: str) -> None:
    (left,) = run_ranks(_crash_in_the_second_save, tmp_path, renamed, world_size=1)
    assert left == [".partial", "step-000001"]
    assert (tmp_path / ".partial" / MARKER).exists() == (renamed == ".partial"), "written before the folder is renamed"
    assert run_ranks(load, tmp_path) == [(1, {1.0}, [])] * 2
    # What was left over does not get into the next one.
    (tmp_path / ".partial" / "rubbish").write_text("left over")
    assert run_ranks(_save, tmp_path, 1, 2) == [["step-000002"]] * 2
    assert not list(tmp_path.rglob("rubbish"))


def test_only_what_the_run_wrote_is_removed(tmp_path: Path) -> None:
    run_ranks(_save, tmp_path, 1, run="another run")
    run_ranks(_save, tmp_path, 2, 3, 4, keep=3)
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-000002").rename(tmp_path / "step-000001-copy")
    (tmp_path / "step-000003" / "note").write_text("the user's")
    (tmp_path / "step-000006").write_text("the user's, in the way")
    left = ["step-000001", "step-000001-copy", "step-000003", "step-000006", "step-000006.aside", "step-best"]
    assert run_ranks(_save, tmp_path, 5, 6) == [left] * 2
    assert run_ranks(load, tmp_path) == [(6, {6.0}, [])] * 2


def test_a_damaged_checkpoint_takes_no_place_of_a_good_one(tmp_path: Path) -> None:
    run_ranks(_save, tmp_path, 1, 2, 3, keep=2)
    (tmp_path / "step-000003" / "__0_0.distcp").write_bytes(b"cut off")
    assert run_ranks(_save, tmp_path, 4, keep=2) == [["step-000002", "step-000003", "step-000004"]] * 2
    # With two good ones it is one of those that are too old.
    assert run_ranks(_save, tmp_path, 5, keep=2) == [["step-000004", "step-000005"]] * 2


# It cannot be renamed, or not be removed.
@long.parametrize("stuck", ["step-000001", ".discarded-step-000001"], always=["step-000001"])
def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path: Path, stuck: str) -> None:
    left = sorted([stuck, "step-000002", "step-000003"])
    problem = f"cannot remove {tmp_path}/step-000001: {os.strerror(errno.EACCES)}"
    first, second = run_ranks(_save_beside, tmp_path, stuck)
    assert first == ((), (problem,), left)
    assert second == ((), (), left)
    assert run_ranks(load, tmp_path) == [(3, {3.0}, [])] * 2
    # What could not be removed is tried again.
    assert run_ranks(_save, tmp_path, 4) == [["step-000004"]] * 2


def _save_beside(folder: Path, stuck: str) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    """Save beside a folder that cannot be changed; returns the problems of two saves, and what is left."""
    run = SmallRun(folder)
    run.step_and_save(1, 2, keep=2)
    problems = run.save(2, keep=2)
    run.step(3)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Path, "rename"), (shutil, "rmtree")):
            patch.setattr(owner, name, _refusing(getattr(owner, name), stuck))
        return problems, run.save(3, keep=2), names(folder)


def _refusing(call: Callable[..., Any], stuck: str) -> Callable[..., Any]:
    """A function that changes files, but not one of this name."""

    def change(path: Path, *arguments: Any, **options: Any) -> Any:
        if Path(path).name == stuck:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), stuck)
        return call(path, *arguments, **options)

    return change


def test_a_failed_save_is_tidied_up_before_any_rank_goes_on(tmp_path: Path) -> None:
    assert run_ranks(_fail_and_look, tmp_path) == [[], []]


def _fail_and_look(folder: Path) -> list[str]:
    """What a rank finds where a save has failed that takes its time to remove what it has written."""
    run = SmallRun(folder)
    run.step(1)
    abandon = CheckpointFolder.abandon

    def abandon_slowly(self: CheckpointFolder) -> None:
        time.sleep(0.5)
        abandon(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointFolder, "abandon", abandon_slowly)
        patch.setattr("fsdp_compile.training.checkpoint_folder.os.fsync", _fail)
        with pytest.raises(CheckpointError):
            run.save(1)
        return names(folder)


def _fail(_: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_what_is_in_the_place_of_an_unfinished_checkpoint_is_removed(tmp_path: Path, kind: str) -> None:
    folder, other = tmp_path / "checkpoints", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (other / "note").write_text("the user's")
    partial = folder / ".partial"
    make: dict[str, Callable[[], None]] = {
        "file": partial.touch,
        "link": lambda: partial.symlink_to(other),
        "pipe": lambda: os.mkfifo(partial),
    }
    make[kind]()
    assert run_ranks(_save, folder, 1, world_size=1) == [["step-000001"]]
    assert (other / "note").exists()


def test_a_checkpoint_that_is_a_link_is_loaded_and_stays(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    run_ranks(_save, folder, 1, 2, keep=2)
    (folder / "step-000002").rename(elsewhere)
    (folder / "step-000002").symlink_to(elsewhere)
    (folder / "step-000009").symlink_to(tmp_path / "nowhere")
    assert run_ranks(load, folder) == [(2, {2.0}, [])] * 2
    left = ["step-000002", "step-000003", "step-000009"]
    assert run_ranks(_save, folder, 3) == [left] * 2
    assert (elsewhere / MARKER).exists()


@on_ranks()
def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"there is no complete checkpoint in {tmp_path}\n")


@pytest.mark.parametrize("full", ["__1_0.distcp", ".metadata.tmp", MARKER])
def test_a_full_disk_is_named_on_all_ranks_and_the_old_checkpoint_stays(tmp_path: Path, full: str) -> None:
    messages = run_ranks(_save_to_a_full_disk, tmp_path, full)
    rank = 1 if full.startswith("__1") else 0
    what = f"rank {rank} cannot write {tmp_path}/.partial/{full}: {os.strerror(errno.ENOSPC)}\n"
    assert messages == [f"{what}  where: step 2\n  instead: go on from {tmp_path}/step-000001, which is complete"] * 2
    assert names(tmp_path) == ["step-000001"]
    assert run_ranks(load, tmp_path) == [(1, {1.0}, [])] * 2


def _save_to_a_full_disk(folder: Path, full: str) -> str:
    run = SmallRun(folder)
    run.step_and_save(1)
    run.step(2)
    with full_disk(full), pytest.raises(CheckpointError) as caught:
        run.save(2)
    return str(caught.value)


@pytest.mark.parametrize("in_background", [False, True])
def test_values_that_are_not_finite_are_not_saved(tmp_path: Path, in_background: bool) -> None:  # noqa: FBT001
    (message,) = set(run_ranks(_save_nan, tmp_path, in_background=in_background))
    assert message == "model.weight has values on rank 1 that are not finite, so that no checkpoint is written"
    assert names(tmp_path) == ["step-000001"]


def _save_nan(folder: Path, *, in_background: bool) -> str:
    run = SmallRun(folder)
    run.step_and_save(1)
    run.step(2)
    run.spoil()
    with pytest.raises(CheckpointError) as caught:
        run.save(2, in_background=in_background)
    return caught.value.what
