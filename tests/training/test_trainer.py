"""The run itself on ranks that are already there, its graphs run op by op."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_compile._torch.distributed import timeout_of
from fsdp_compile.comm.groups import World
from fsdp_compile.comm.placement import DeviceKind
from fsdp_compile.errors import ConfigError, FSDPCompileError, RankMismatchError
from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.data import read_corpus
from fsdp_compile.training.job import Job, Run, lock_run
from fsdp_compile.training.metrics import open_display, read_records
from fsdp_compile.training.trainer import Trainer, train
from tests.ranks import run_ranks
from tests.training.small_run import names

TINY: dict[str, Any] = {"steps": 3, "batch_size": 4, "seq_len": 16, "width": 16, "layers": 1, "heads": 2}
TEXT = b"every rank holds a shard of every weight. " * 40


def _job(folder: Path, options: dict[str, Any], text: Path, ranks: int) -> Job:
    config = TrainConfig(**TINY | {"data": str(text), "log_every": 1, "eval_batches": 1} | options)
    begun_with = read_corpus(config.data, config.seq_len).fingerprint
    run = Run(options=config, text_fingerprint=begun_with, run="this")
    return Job(run=run, folder=folder / "run", ranks=ranks, device=DeviceKind.CPU)


def _world() -> World:
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))


def _train(folder: Path, options: dict[str, Any], *, matplotlib: bool = True, same_text: bool = True) -> str:
    """Begin the run in a folder op by op, or go on with it; returns what this rank showed."""
    world = _world()
    text = folder / f"text-{world.rank}"
    text.write_bytes(TEXT if same_text or world.rank == 0 else TEXT[::-1])
    job = _job(folder, options, text, world.size)
    of_first = world.gather(job.run.text_fingerprint)[0]
    job = replace(job, run=replace(job.run, text_fingerprint=of_first))
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(torch, "compile", functools.partial(torch.compile, options={"lower": "eager"}))
        if not matplotlib:
            patch.setattr("fsdp_compile.training.metrics.find_spec", lambda _name: None)
        train(job, world)
    return shown.getvalue()


@pytest.mark.long
def test_the_first_rank_shows_the_run_and_the_others_nothing(tmp_path: Path) -> None:
    shown, nothing = run_ranks(_train, tmp_path, {"mixed_precision": "bf16"})
    assert nothing == ""
    lines = shown.splitlines()
    assert lines[0] == f"2 ranks on cpu, run folder {tmp_path / 'run'}"
    assert lines[-2] == f"curves: {tmp_path / 'run' / 'metrics.png'}"
    assert lines[-1].startswith("held-out loss 5.")
    before, *_, after = (record.held_out_loss for record in read_records(tmp_path / "run" / "metrics.jsonl"))
    assert before is not None
    assert after is not None
    assert after < before


@pytest.mark.long
def test_a_profiled_run_compares_its_third_step_with_the_plan(tmp_path: Path) -> None:
    options = {"profile": True, "steps": 4, "seed": 3}
    shown, nothing = run_ranks(_train, tmp_path, options)
    assert nothing == ""
    assert "planned  measured" in shown
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record.step for record in records] == [0, 1, 2, 3, 4]
    assert all(10**7 < (record.memory_bytes or 0) < 10**11 for record in records[1:])  # a process with torch


def test_without_matplotlib_a_line_says_how_to_get_the_curve(tmp_path: Path) -> None:
    (shown,) = run_ranks(_train, tmp_path, {}, matplotlib=False, world_size=1)
    assert "no curves without matplotlib: pip install 'fsdp-compile[plot]'\n" in shown
    assert not (tmp_path / "run" / "metrics.png").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(FSDPCompileError, match="a lower --learning-rate"):
        run_ranks(_train, tmp_path, {"learning_rate": 1e30, "warmup_ratio": 0.0}, world_size=1)


def _train_with_nan(folder: Path, on_nonfinite: str, *steps: int) -> tuple[str, str]:
    """Train where the loss of rank 1 is not a number in some steps; returns what was shown, or the error."""
    loss_of = Trainer._loss

    def spoil(self: Trainer, blocks: torch.Tensor, key: str | int) -> torch.Tensor:
        loss = loss_of(self, blocks, key)
        return loss * float("nan") if key in steps and self.world.rank == 1 else loss

    options = {"on_nonfinite": on_nonfinite, "steps": 5, "checkpoint_every": 1, "eval_every": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_loss", spoil)
        try:
            return _train(folder, options), ""
        except FSDPCompileError as error:
            return "", str(error)


NAN = "the loss of rank 1 is nan; the first gradient that is not finite is that of unit "


@pytest.mark.long
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    (shown, _), (_, error) = run_ranks(_train_with_nan, tmp_path, "skip", 1, 4)
    assert error == ""
    for step in (1, 4):
        assert f"step {step} skipped: {NAN}" in shown
    assert "no checkpoint of step 1: every step so far was skipped\n" in shown
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record.skipped_steps for record in records] == [0, 1, 1, 1, 2, 2]
    assert [record.loss is None for record in records] == [True, True, False, False, True, False]
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert names(tmp_path / "run" / "checkpoints") == ["step-000004", "step-000005"]


@pytest.mark.long
def test_a_step_that_is_not_finite_ends_the_run_and_its_checkpoints_stay(tmp_path: Path) -> None:
    (_, first), (_, second) = run_ranks(_train_with_nan, tmp_path, "stop", 4)
    assert first == second
    assert first.startswith(f"step 4 updated nothing: {NAN}")
    assert f"where: training; the last checkpoint is {tmp_path}/run/checkpoints/step-000003\n" in first
    assert names(tmp_path / "run" / "checkpoints") == ["step-000002", "step-000003"]


MEASURED = ("step", "loss", "held_out_loss", "grad_norm", "lr")


def _measured(folder: Path) -> list[list[float | None]]:
    records = read_records(folder / "run" / "metrics.jsonl")
    return [[getattr(record, name) for name in MEASURED] for record in records]


RESUMED = {"steps": 4, "batch_size": 12, "checkpoint_every": 1, "keep_checkpoints": 4, "eval_every": 1}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_ranks(_train, folder, RESUMED)
    return folder


def _interrupted(uninterrupted: Path, copy: Path) -> Path:
    """A copy of a run's folder as it was after step 2."""
    shutil.copytree(uninterrupted, copy)
    for step in (3, 4):
        shutil.rmtree(copy / "run" / "checkpoints" / f"step-00000{step}")
    return copy


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [
        pytest.param(1, 1, marks=pytest.mark.long),
        (2, 1),
        pytest.param(2, 2, marks=pytest.mark.long),
        pytest.param(3, 1, marks=pytest.mark.long),
        pytest.param(4, 1, marks=pytest.mark.long),
        pytest.param(4, 2, marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_goes_on_as_if_uninterrupted(
    ranks: int, replicas: int, uninterrupted: Path, tmp_path: Path
) -> None:
    again = _interrupted(uninterrupted, tmp_path / "again")
    shown, *_ = run_ranks(_train, again, RESUMED | {"replicas": replicas}, world_size=ranks)
    assert "resumed after step 2\n" in shown
    assert f"({replicas} replicas)" in shown if replicas > 1 else "replicas" not in shown
    if (ranks, replicas) == (2, 1):  # bit for bit on as many ranks as before
        assert _measured(again) == _measured(uninterrupted)
    for mine, theirs in zip(_measured(again), _measured(uninterrupted), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.long
def test_a_resumed_run_has_the_weight_decay_that_it_is_given(uninterrupted: Path, tmp_path: Path) -> None:
    again = _interrupted(uninterrupted, tmp_path / "again")
    run_ranks(_train, again, RESUMED | {"weight_decay": 10.0})
    mine, before = _measured(again), _measured(uninterrupted)
    assert mine[:3] == before[:3]
    assert mine[4] != before[4]


@pytest.mark.long
def test_checkpoints_in_the_background_are_those_of_a_run_that_waits(uninterrupted: Path, tmp_path: Path) -> None:
    run_ranks(_train, tmp_path, RESUMED | {"async_checkpoints": True})
    assert _measured(tmp_path) == _measured(uninterrupted)
    mine, theirs = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.distcp")}
        for folder in (tmp_path, uninterrupted)
    )
    assert len(theirs) == 8  # four steps, two ranks
    assert mine == theirs


@pytest.mark.long
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    options = {"checkpoint_every": 1}
    run_ranks(_train, tmp_path, options, world_size=1)
    shard = tmp_path / "run" / "checkpoints" / "step-000003" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[::-1])
    (shown,) = run_ranks(_train, tmp_path, options | {"steps": 4}, world_size=1)
    assert f"not loaded: the contents of {shard} have changed" in shown
    assert "resumed after step 2\n" in shown
    assert [record.step for record in read_records(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert names(tmp_path / "run" / "checkpoints") == ["step-000003", "step-000003.aside", "step-000004"]


def test_an_old_checkpoint_that_stays_is_told_once(tmp_path: Path) -> None:
    (shown,) = run_ranks(_train_beside_a_stuck_checkpoint, tmp_path, world_size=1)
    stuck = tmp_path / "run" / "checkpoints" / "step-000001"
    assert shown.count(f"cannot remove {stuck}: Permission denied\n") == 1
    assert "after 4 steps" in shown
    assert names(tmp_path / "run" / "checkpoints") == ["step-000001", "step-000004"]


def _train_beside_a_stuck_checkpoint(folder: Path) -> str:
    rename = Path.rename

    def change(self: Path, target: Path) -> Path:
        if self.name == "step-000001":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", change)
        return _train(folder, {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 1})


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    with lock_run(tmp_path / "run"), pytest.raises(ConfigError, match="another process trains in "):
        run_ranks(_train, tmp_path, {}, world_size=1)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock"]


def test_ranks_that_read_other_text_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(RankMismatchError, match=r"rank 1 read other text than that which the run began with\n"):
        run_ranks(_train, tmp_path, {}, same_text=False)


def _replicated(text: Path) -> tuple[tuple[int, ...], set[float]]:
    """The shape of the mesh of replicas and shards, and how long its groups wait."""
    job = _job(text.parent, {"replicas": 2}, text, 4)
    with open_display(3) as display:
        trainer = Trainer(job, read_corpus(str(text), 16), _world(), display)
    weight = trainer.model.head.weight
    assert isinstance(weight, DTensor)
    groups = weight.device_mesh.get_all_groups()
    return tuple(weight.device_mesh.shape), {timeout_of(group).total_seconds() for group in groups}


def test_replicas_are_sharded_over_their_ranks_and_wait_as_long_as_the_world(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    found = run_ranks(_replicated, tmp_path / "text", world_size=4, timeout_s=77.0)
    assert found == [((2, 2), {77.0})] * 4
