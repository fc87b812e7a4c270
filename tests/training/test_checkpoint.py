"""Checkpoints that are whole or not there, whatever happens while one is written; and what is kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_compile.errors import CheckpointError, ConfigError
from fsdp_compile.training.checkpoint_folder import MARKER
from tests.ranks import run_ranks
from tests.training.small_run import SmallRun


class Crash(Exception):  # noqa: N818 (it stands for a power cut)
    """The process ends here."""


def _save(folder: Path, *steps: int, keep: int = 1, run: str = "this run") -> list[str]:
    SmallRun(folder, run).step_and_save(*steps, keep=keep)
    return _names(folder)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    return _names(folder)


def _load(folder: Path) -> tuple[int, set[float], tuple[str, ...]]:
    run = SmallRun(folder)
    loaded = run.load()
    return loaded.step, run.seen(), loaded.skipped


def test_new_checkpoints_take_the_places_of_the_oldest(tmp_path: Path) -> None:
    assert run_ranks(_save, tmp_path, 1, 2) == [["step-000002"]] * 2
    assert run_ranks(_load, tmp_path) == [(2, {2.0}, ())] * 2
    assert run_ranks(_save, tmp_path, 3, 4, keep=2) == [["step-000003", "step-000004"]] * 2
    # What was just written is never one too many, whatever there is of later steps.
    assert run_ranks(_save, tmp_path, 1, 2) == [["step-000002", "step-000003", "step-000004"]] * 2


@pytest.mark.long
def test_another_number_of_ranks_can_go_on(tmp_path: Path) -> None:
    run_ranks(_save, tmp_path, 2)
    for ranks in (1, 3, 4):
        assert run_ranks(_load, tmp_path, world_size=ranks) == [(2, {2.0}, ())] * ranks
    run_ranks(_save, tmp_path, 3, world_size=3)
    assert run_ranks(_load, tmp_path) == [(3, {3.0}, ())] * 2


@pytest.mark.parametrize("renamed", [".metadata", ".partial"])  # torch's last file, then our folder
def test_the_old_checkpoint_stays_until_the_new_one_is_whole(tmp_path: Path, renamed: str) -> None:
    (left,) = run_ranks(_crash_in_the_second_save, tmp_path, renamed, world_size=1)
    assert left == [".partial", "step-000001"]
    assert run_ranks(_load, tmp_path) == [(1, {1.0}, ())] * 2
    # What was left over does not get into the next one.
    (tmp_path / ".partial" / "rubbish").write_text("left over")
    assert run_ranks(_save, tmp_path, 1, 2) == [["step-000002"]] * 2
    assert not list(tmp_path.rglob("rubbish"))


def test_old_checkpoints_are_still_there_when_the_new_one_gets_its_name(tmp_path: Path) -> None:
    assert run_ranks(_left_at_rename, tmp_path, world_size=1) == [[[], ["step-000001"]]]


def _left_at_rename(folder: Path) -> list[list[str]]:
    seen: list[list[str]] = []
    rename: Callable[[Path, Path], Path] = Path.rename

    def look(self: Path, target: Path) -> Path:
        if self.name == ".partial":
            assert (self / MARKER).is_file()
            seen.append(sorted(path.name for path in folder.glob("step-*")))
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", look)
        _save(folder, 1, 2)
    return seen


def test_only_what_the_run_wrote_is_removed(tmp_path: Path) -> None:
    run_ranks(_save, tmp_path, 1, run="another run")
    run_ranks(_save, tmp_path, 2, 3, 4, keep=3)
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-000002").rename(tmp_path / "step-000001-copy")
    (tmp_path / "step-000003" / "note").write_text("the user's")
    (tmp_path / "step-000006").write_text("the user's, in the way")
    left = ["step-000001", "step-000001-copy", "step-000003", "step-000006", "step-000006.aside", "step-best"]
    assert run_ranks(_save, tmp_path, 5, 6) == [left] * 2
    assert run_ranks(_load, tmp_path) == [(6, {6.0}, ())] * 2


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (message,) = set(run_ranks(_refused, tmp_path))
    assert message.startswith(f"there is no complete checkpoint in {tmp_path}\n")


def _refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(folder)
    return str(caught.value)


@pytest.mark.parametrize("full", ["__1_0.distcp", ".metadata.tmp", MARKER])
def test_a_full_disk_is_named_on_all_ranks_and_the_old_checkpoint_stays(tmp_path: Path, full: str) -> None:
    messages = run_ranks(_save_to_a_full_disk, tmp_path, full)
    rank = 1 if full.startswith("__1") else 0
    what = f"rank {rank} cannot write a checkpoint: {tmp_path}/.partial/{full}: {os.strerror(errno.ENOSPC)}\n"
    assert messages == [f"{what}  where: step 2\n  instead: go on from {tmp_path}/step-000001, which is complete"] * 2
    assert _names(tmp_path) == ["step-000001"]
    assert run_ranks(_load, tmp_path) == [(1, {1.0}, ())] * 2


def _save_to_a_full_disk(folder: Path, full: str) -> str:
    run = SmallRun(folder)
    run.step_and_save(1)
    run.step(2)
    mkdir: Callable[..., None] = Path.mkdir

    def fill(self: Path, **options: bool) -> None:
        mkdir(self, **options)
        if self.name == ".partial" and not (self / full).is_symlink():  # torch makes the folder again
            (self / full).symlink_to("/dev/full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", fill)
        with pytest.raises(CheckpointError) as caught:
            run.save(2)
    return str(caught.value)


def test_values_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    (message,) = set(run_ranks(_save_nan, tmp_path))
    assert message.startswith("model.weight has values on rank 1 that are not finite")
    assert _names(tmp_path) == ["step-000001"]


def _save_nan(folder: Path) -> str:
    run = SmallRun(folder)
    run.step_and_save(1)
    run.step(2)
    if run.world.rank == 1:
        run.model.weight.data.to_local()[-1, -1] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError) as caught:
        run.save(2)
    return str(caught.value)
