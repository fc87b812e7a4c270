"""Checkpoints that are not what was written: the one before is loaded, what was wrong is named, nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fsdp_compile.errors import ConfigError
from fsdp_compile.formats.files import MARKER, FileDigest
from fsdp_compile.training.checkpoint_folder import CheckpointFolder
from tests.formats.damage import flip, harm_in_entry, harm_in_metadata, in_metadata, move_shards, replace, truncate
from tests.ranks import run_ranks
from tests.training.small_run import RUN, SmallRun, load, names

pytestmark = pytest.mark.core

SHARD = "__1_0.distcp"
METADATA = ".metadata"


def _agreed(damage: Callable[[Path], object]) -> Callable[[Path], None]:
    """Damage with which the marker agrees, as somebody does it who means harm."""

    def damage_and_agree(file: Path) -> None:
        damage(file)
        with _marker(file.with_name(MARKER)) as marker:
            for each in (file, *file.parent.glob("*.distcp")):
                marker["files"][each.name] = asdict(FileDigest.of(each))

    return damage_and_agree


@contextmanager
def _marker(file: Path) -> Iterator[Any]:
    """What a marker says, to be changed."""
    marker = json.loads(file.read_text())
    yield marker
    file.write_text(json.dumps(marker))


def _rename_run(file: Path) -> None:
    with _marker(file) as marker:
        marker["run"] = "another run"


def _name(name: str) -> Callable[[Path], None]:
    def add(file: Path) -> None:
        with _marker(file) as marker:
            marker["files"][name] = marker["files"][METADATA]

    return add


def _forget_metadata(file: Path) -> None:
    with _marker(file) as marker:
        del marker["files"][METADATA]


def _write(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(text)


def _make_pipe(file: Path) -> None:
    """In which nobody writes, so that it is read for ever."""
    file.unlink()
    os.mkfifo(file)


def _make_empty_pipe(file: Path) -> None:
    """That is as long as the marker says."""
    _agreed(lambda shard: shard.write_bytes(b""))(file)
    _make_pipe(file)


def _make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link_to_zeros(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": (SHARD, Path.unlink, "cannot read {file}: No such file or directory"),
    "truncated": (SHARD, truncate, "{file} has {size} bytes instead of "),
    "flipped": (SHARD, flip, "the contents of {file} have changed"),
    "flipped metadata": (METADATA, flip, "the contents of {file} have changed"),
    "foreign shard": (SHARD, _agreed(replace), "rank 0 cannot load {folder}: "),
    "foreign metadata": (METADATA, _agreed(replace), "cannot read {file}: UnpicklingError: "),
    "hostile metadata": (METADATA, _agreed(harm_in_metadata), "it refers to posix.mkdir, which no checkpoint needs"),
    "hostile value": (METADATA, _agreed(harm_in_entry("optimizer.param_groups.0.lr")), "it refers to posix.mkdir"),
    "hostile tensor": (METADATA, _agreed(harm_in_entry("model.weight")), "it refers to posix.mkdir"),
    "file elsewhere": (METADATA, _agreed(in_metadata(move_shards)), "it refers to ../step-000001/__0_0.distcp, a file"),
    "no marker": (MARKER, Path.unlink, "{folder} is no complete checkpoint: it has no complete.json"),
    "truncated marker": (MARKER, truncate, "cannot read {file}: JSONDecodeError: "),
    "deep marker": (MARKER, _write("[" * 100_000), "cannot read {file}: RecursionError: "),
    "infinite marker": (MARKER, _write('{"run": "", "step": 1e999, "files": {}}'), "cannot read {file}: OverflowError"),
    "marker of a list": (MARKER, _write("[]"), "cannot read {file}: TypeError"),
    "NUL in a name": (MARKER, _name("a\0b"), "{file} is damaged: 'a\\x00b' is no name of a file"),
    "line feed in a name": (MARKER, _name("a\nb"), "{file} is damaged: 'a\\nb' is no name of a file"),
    "no name": (MARKER, _name(""), "{file} is damaged: '' is no name of a file"),
    "folder above": (MARKER, _name(".."), "{file} is damaged: '..' is no name of a file"),
    "metadata not named": (MARKER, _forget_metadata, "{file} does not name .metadata"),
    "pipe as marker": (MARKER, _make_pipe, "{file} is no regular file"),
    "zeros as marker": (MARKER, _link_to_zeros, "{file} is no regular file"),
    "folder as marker": (MARKER, _make_folder, "{file} is no regular file"),
    "pipe as shard": (SHARD, _make_empty_pipe, "{file} is no regular file"),
    "folder as shard": (SHARD, _make_folder, "{file} is no regular file"),
    "folder as metadata": (METADATA, _make_folder, "{file} is no regular file"),
    "another run's": (MARKER, _rename_run, "{folder} is a checkpoint of another run"),
}
"""The file that is damaged, how, and a part of what is said."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    run_ranks(_save, folder)
    return folder


def _save(folder: Path) -> None:
    SmallRun(folder).step_and_save(1, 2)


def _load_all(folders: list[Path]) -> list[tuple[int, set[float], list[str]]]:
    return [load(folder) for folder in folders]


def test_the_checkpoint_before_is_loaded_and_file_and_cause_are_named(written: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in DAMAGE]
    for folder, (name, damage, _) in zip(folders, DAMAGE.values(), strict=True):
        shutil.copytree(written, folder)
        damage(folder / "step-000002" / name)
    mine, other = run_ranks(_load_all, folders)
    assert mine == other
    for folder, (name, _, said), (step, seen, skipped) in zip(folders, DAMAGE.values(), mine, strict=True):
        assert (step, seen) == (1, {1.0}), folder
        (message,) = skipped
        file = folder / "step-000002" / name
        size = file.stat().st_size if file.exists() else 0
        assert said.format(file=file, folder=file.parent, size=size) in message
        assert str(file.parent) in message
        assert not list(folder.rglob("executed"))


def test_the_hostile_files_would_do_what_they_say(written: Path, tmp_path: Path) -> None:
    """So that the test before tests something."""
    file = tmp_path / "step-000002" / METADATA
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    harm_in_metadata(file)
    pickle.loads(file.read_bytes())
    assert (file.parent / "executed").exists()


def test_what_names_and_sizes_tell_needs_no_ranks(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "copy")
    checkpoints = CheckpointFolder(tmp_path / "copy", RUN)
    for name in ("step-best", "step-000009"):  # a user's, and one that is no checkpoint
        (tmp_path / "copy" / name).mkdir()
    assert checkpoints.newest() == tmp_path / "copy" / "step-000002"
    truncate(tmp_path / "copy" / "step-000002" / SHARD)
    assert checkpoints.newest() == tmp_path / "copy" / "step-000001"


def test_without_a_complete_one_all_problems_are_named_on_all_ranks(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    flip(folder / "step-000002" / SHARD)
    truncate(folder / "step-000001" / SHARD)
    (message,) = set(run_ranks(_refused, folder))
    lines = f"there is no complete checkpoint in {folder}; the contents of {folder}/step-000002/{SHARD} have changed"
    assert message.startswith(lines)
    assert f"; {folder}/step-000001/{SHARD} has " in message


def _refused(folder: Path) -> str:
    run = SmallRun(folder)
    with pytest.raises(ConfigError) as caught:
        run.load()
    return str(caught.value)


def test_a_damaged_checkpoint_gives_its_name_to_the_next(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(written, folder)
    flip(folder / "step-000002" / SHARD)
    run_ranks(_load_and_save, folder)
    assert names(folder) == ["step-000001", "step-000002", "step-000002.aside"]
    assert run_ranks(load, folder) == [(2, {2.0}, [])] * 2


def _load_and_save(folder: Path) -> Any:
    run = SmallRun(folder)
    step, _ = run.load()
    if run.world.rank == 0:
        run.checkpoints.set_aside_after(step)
    run.step_and_save(2)
