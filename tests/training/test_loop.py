"""The run itself on ranks that are already there, its graphs run op by op."""

from __future__ import annotations

import contextlib
import functools
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile.errors import FSDPCompileError, RankMismatchError
from fsdp_compile.training.config import TrainConfig
from fsdp_compile.training.job import Job, RunFolder
from fsdp_compile.training.loop import train
from fsdp_compile.training.metrics import held_out_losses, read_records
from fsdp_compile.training.world import DeviceKind, World
from tests.ranks import run_ranks

TINY = {"steps": 3, "batch_size": 4, "seq_len": 16, "width": 16, "layers": 1, "heads": 2, "log_every": 1}
TEXT = b"every rank holds a shard of every weight. " * 40


def _train(folder: Path, options: dict[str, Any], *, matplotlib: bool = True, same_text: bool = True) -> str:
    """Train in a new folder; returns what this rank showed."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    text = folder / f"text-{world.rank}"
    text.write_bytes(TEXT if same_text or world.is_first else TEXT[::-1])
    config = TrainConfig.from_dict(TINY | {"data": str(text), "eval_batches": 1, "sample_bytes": 3} | options)
    job = Job(config=config, folder=RunFolder(folder / "run"), done_steps=0, ranks=world.size, device=DeviceKind.CPU)
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown):
        patch.setattr(torch, "compile", functools.partial(torch.compile, options={"lower": "eager"}))
        if not matplotlib:
            patch.setattr("fsdp_compile.training.metrics.find_spec", lambda _name: None)
        train(job, world)
    return shown.getvalue()


def test_the_first_rank_shows_the_run_and_the_others_nothing(tmp_path: Path) -> None:
    shown, nothing = run_ranks(_train, tmp_path, {"mixed_precision": "bf16"})
    assert nothing == ""
    lines = shown.splitlines()
    assert lines[0] == f"2 ranks on cpu, run folder {tmp_path / 'run'}"
    assert lines[2].startswith("each rank will hold parameters 0.02 of 0.05 MB")  # float32 shards, also with bf16
    assert lines[-2] == f"loss curve: {tmp_path / 'run' / 'loss.png'}"
    assert lines[-1].startswith("held-out loss 5.")
    (_, before), (_, after) = held_out_losses(read_records(tmp_path / "run" / "metrics.jsonl"))
    assert after < before


def test_without_matplotlib_a_line_says_how_to_get_the_curve(tmp_path: Path) -> None:
    (shown,) = run_ranks(_train, tmp_path, {"sample_bytes": 0}, matplotlib=False, world_size=1)
    assert "no loss curve without matplotlib: pip install 'fsdp-compile[plot]'\n" in shown
    assert "sample" not in shown
    assert not (tmp_path / "run" / "loss.png").exists()
    assert not (tmp_path / "run" / "sample.txt").exists()


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(FSDPCompileError, match="a lower --learning-rate"):
        run_ranks(_train, tmp_path, {"learning_rate": 1e30, "warmup_ratio": 0.0}, world_size=1)


def test_ranks_that_read_other_text_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(RankMismatchError, match=r"rank 1 read other text than rank 0\n"):
        run_ranks(_train, tmp_path, {}, same_text=False)
