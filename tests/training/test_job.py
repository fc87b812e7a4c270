"""What a run goes on from, before anything is started for it; and who may use its folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdp_compile.comm.placement import DeviceKind, Placement, launcher_folder
from fsdp_compile.errors import ConfigError
from fsdp_compile.formats.files import FileDigest, check_contents
from fsdp_compile.training.checkpoint_folder import CheckpointFolder, step_of
from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.data import read_corpus
from fsdp_compile.training.job import CHECKPOINTS, CONFIG, RUNS, Job, Run, lock_run, new_job, newest_folder, resumed_job
from tests.training.command import finish, start

RUN = "this"
LAUNCHER = "/tmp/reports/run_a"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps that is complete, with checkpoints of steps 2 and 4."""
    (tmp_path / "text").write_bytes(b"some text " * 100)
    config = TrainConfig(data=str(tmp_path / "text"), seq_len=8, steps=4)
    run = tmp_path / "run"
    fingerprint = read_corpus(config.data, config.seq_len).fingerprint
    Run(options=config, text_fingerprint=fingerprint, run=RUN, launcher=LAUNCHER).write(run)
    checkpoints = CheckpointFolder(run / CHECKPOINTS, RUN)
    for step in (2, 4):
        checkpoints.begin()
        shard = checkpoints.partial / "shard"
        shard.write_bytes(bytes(step))
        checkpoints.finish(step, {shard.name: FileDigest.of(shard)}, keep=2)
    return run


def _done_steps(run: Path, **options: int) -> int:
    job = resumed_job(options, run, Placement(1), DeviceKind.CPU)
    return step_of(job.checkpoints.newest(check_contents))


def _flip(run: Path, step: int) -> Path:
    shard = run / CHECKPOINTS / f"step-{step:06d}" / "shard"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    return shard


def _refused(run: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        _done_steps(run)
    return str(caught.value)


def test_a_run_is_done_if_its_last_checkpoint_is_what_was_written(run: Path) -> None:
    assert _refused(run).startswith(f"the run in {run} has already done its 4 steps\n")
    assert _done_steps(run, steps=5) == 4
    _flip(run, 4)
    assert _done_steps(run) == 2
    _flip(run, 2)
    message = _refused(run)
    assert message.startswith(f"{run} holds no complete checkpoint; ")
    for step in (2, 4):
        assert f"; the contents of {run / CHECKPOINTS}/step-00000{step}/shard have changed" in message


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"run": "this"}', "[" * 100_000, '{"options": 3, "run": ""}'])
def test_a_damaged_configuration_is_named(text: str, run: Path) -> None:
    (run / CONFIG).write_text(text)
    assert _refused(run).startswith(f"{run / CONFIG} is damaged: ")


def test_replicas_divide_the_ranks(run: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed_job({"replicas": 2}, run, Placement(3), DeviceKind.CPU)
    assert str(caught.value).startswith("3 ranks cannot be divided into 2 replicas of one size\n  where: --replicas\n")


def test_the_newest_run_is_the_one_that_was_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for time_s, name in enumerate(("baseline", "2026-01-02", "2026-01-01")):
        config = RUNS / name / "config.json"
        config.parent.mkdir(parents=True)
        config.write_text("{}")
        os.utime(config, (time_s, time_s))
    assert newest_folder() == RUNS / "2026-01-01"


def _started_again(run: Path, launcher: str) -> Job:
    options = asdict(Run.read(run).options)
    return new_job(options, run, Placement(1), DeviceKind.CPU, launcher)


def test_ranks_that_are_started_again_find_their_own_run_and_no_other(run: Path) -> None:
    assert _started_again(run, LAUNCHER).run.run == RUN
    for other in ("", "/tmp/reports/run_b"):
        with pytest.raises(ConfigError, match=f"there is a run in {run} already"):
            _started_again(run, other)
    for unknown in ({"launcher": ""}, {}):  # one that no launcher began
        written = json.loads((run / CONFIG).read_text())
        del written["launcher"]
        (run / CONFIG).write_text(json.dumps(written | unknown))
        with pytest.raises(ConfigError, match=f"there is a run in {run} already"):
            _started_again(run, LAUNCHER)
        Run.read(run).write(run)


def test_ranks_that_are_started_again_find_their_own_text(run: Path) -> None:
    text = Path(str(Run.read(run).options.data))
    text.write_bytes(b"other text" * 100)
    with pytest.raises(ConfigError, match="the text is not that which the run began with"):
        _started_again(run, LAUNCHER)


def test_the_text_of_a_resumed_run_may_have_moved(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = (tmp_path / "text").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    options = {"data": moved.name, "steps": 5}
    assert resumed_job(options, run, Placement(1), DeviceKind.CPU).run.options.data == moved.name
    moved.write_bytes(b"other text" * 100)
    with pytest.raises(ConfigError, match="the text is not that which the run began with"):
        resumed_job(options, run, Placement(1), DeviceKind.CPU)


def test_a_launcher_is_known_by_its_folder_of_reports() -> None:
    reports = {"TORCHELASTIC_ERROR_FILE": "/tmp/reports/run_a/attempt_1/3/error.json"}
    assert launcher_folder(reports) == LAUNCHER
    assert launcher_folder({}) == ""


TRY = """
import sys
from pathlib import Path
from fsdp_compile.errors import ConfigError
from fsdp_compile.training.job import lock_run

try:
    with lock_run(Path(sys.argv[1])):
        print("free")
except ConfigError as error:
    print(error)
"""


def test_another_process_has_to_wait(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    with lock_run(folder):
        _, found, _ = finish(start(tmp_path, "-c", TRY, str(folder)))
    assert found.startswith(f"another process trains in {folder}\n")
    _, found, _ = finish(start(tmp_path, "-c", TRY, str(folder)))
    assert found == "free\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"(?s)cannot write in .*/file/run: Not a directory.*--out"),
        lock_run(tmp_path / "file" / "run"),
    ):
        pass


def test_file_systems_may_have_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", fail)
    with lock_run(tmp_path):
        pass
