"""What a run goes on from, before anything is started for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsdp_compile.errors import ConfigError
from fsdp_compile.training.checkpoint_folder import CheckpointFolder, FileDigest
from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.data import read_corpus
from fsdp_compile.training.job import RUNS, Job, RunFolder, Started, new_job, newest_folder, resumed_job
from fsdp_compile.training.placement import DeviceKind, Placement, launcher_folder

RUN = "this"
LAUNCHER = "/tmp/reports/run_a"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run of four steps that is complete, with checkpoints of steps 2 and 4."""
    (tmp_path / "text").write_bytes(b"some text " * 100)
    config = TrainConfig(data=str(tmp_path / "text"), seq_len=8, steps=4)
    run = RunFolder(tmp_path / "run")
    run.write_config(Started(config, read_corpus(config.data, config.seq_len).fingerprint, RUN, LAUNCHER))
    checkpoints = CheckpointFolder(run.checkpoints, RUN)
    for step in (2, 4):
        checkpoints.begin()
        shard = checkpoints.partial / "shard"
        shard.write_bytes(bytes(step))
        checkpoints.finish(step, {shard.name: FileDigest.of(shard)}, keep=2)
    return run


def _done_steps(run: RunFolder, **options: int) -> int:
    return resumed_job(options, run.path, Placement(1), DeviceKind.CPU).done_steps


def _flip(run: RunFolder, step: int) -> Path:
    shard = run.checkpoints / f"step-{step:06d}" / "shard"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    return shard


def _refused(run: RunFolder) -> str:
    with pytest.raises(ConfigError) as caught:
        _done_steps(run)
    return str(caught.value)


def test_a_run_is_done_if_its_last_checkpoint_is_what_was_written(run: RunFolder) -> None:
    assert _refused(run).startswith(f"the run in {run.path} has already done its 4 steps\n")
    assert _done_steps(run, steps=5) == 4
    _flip(run, 4)
    assert _done_steps(run) == 2
    _flip(run, 2)
    message = _refused(run)
    assert message.startswith(f"{run.path} holds no complete checkpoint; ")
    for step in (2, 4):
        assert f"; the contents of {run.checkpoints}/step-00000{step}/shard have changed" in message


def test_a_run_of_an_earlier_version_is_told_from_a_damaged_one(run: RunFolder) -> None:
    written = json.loads(run.config.read_text())
    del written["run"]
    run.config.write_text(json.dumps(written))
    message = _refused(run)
    assert message.startswith(f"the run in {run.path} was started by an earlier version of fsdp_compile")
    assert f"torch.distributed.checkpoint reads {run.checkpoints} as well" in message
    assert "damaged" not in message


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"run": "this"}', "[" * 100_000, '{"options": 3, "run": ""}'])
def test_a_damaged_configuration_is_named(text: str, run: RunFolder) -> None:
    run.config.write_text(text)
    assert _refused(run).startswith(f"{run.config} is damaged: ")


def test_replicas_divide_the_ranks(run: RunFolder) -> None:
    with pytest.raises(ConfigError) as caught:
        resumed_job({"replicas": 2}, run.path, Placement(3), DeviceKind.CPU)
    assert str(caught.value).startswith("3 ranks cannot be divided into 2 replicas of one size\n  where: --replicas\n")


def test_the_newest_run_is_the_one_that_was_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for time_s, name in enumerate(("baseline", "2026-01-02", "2026-01-01")):
        config = RUNS / name / "config.json"
        config.parent.mkdir(parents=True)
        config.write_text("{}")
        os.utime(config, (time_s, time_s))
    assert newest_folder().path == RUNS / "2026-01-01"


def _started_again(run: RunFolder, launcher: str) -> Job:
    options = run.read_config().config.to_dict()
    return new_job(options, run.path, Placement(1), DeviceKind.CPU, launcher)


def test_ranks_that_are_started_again_find_their_own_run_and_no_other(run: RunFolder) -> None:
    assert _started_again(run, LAUNCHER).run == RUN
    for other in ("", "/tmp/reports/run_b"):
        with pytest.raises(ConfigError, match=f"there is a run in {run.path} already"):
            _started_again(run, other)
    # One that no launcher began, or an earlier version, which did not write who did.
    for unknown in ({"launcher": ""}, {}):
        written = json.loads(run.config.read_text())
        del written["launcher"]
        run.config.write_text(json.dumps(written | unknown))
        with pytest.raises(ConfigError, match=f"there is a run in {run.path} already"):
            _started_again(run, LAUNCHER)
        run.write_config(run.read_config())


def test_ranks_that_are_started_again_find_their_own_text(run: RunFolder) -> None:
    text = Path(str(run.read_config().config.data))
    text.write_bytes(b"other text" * 100)
    with pytest.raises(ConfigError, match="the text is not that which the run began with"):
        _started_again(run, LAUNCHER)


def test_a_launcher_is_known_by_its_folder_of_reports() -> None:
    reports = {"TORCHELASTIC_ERROR_FILE": "/tmp/reports/run_a/attempt_1/3/error.json"}
    assert str(launcher_folder(reports)) == LAUNCHER
    assert launcher_folder({}) is None
