"""What a run measures, and what it says where that is not finite."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from fsdp_compile.comm.groups import World
from fsdp_compile.errors import ConfigError
from fsdp_compile.training.metrics import (
    Board,
    Display,
    Record,
    append_record,
    drop_records_after,
    plot_records,
    read_records,
    summary,
)
from fsdp_compile.training.trainer import describe_nonfinite
from tests.ranks import run_ranks

KEYS = ["step", "loss", "held_out_loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes", "time_s", "skipped_steps"]
RECORDS = [Record(step=step, loss=5.0 - step, held_out_loss=4.0 if step == 2 else None, time_s=1) for step in range(4)]


def _written(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "metrics.jsonl"
    for record in RECORDS:
        append_record(path, record)
    return path


def test_every_line_is_an_object_with_the_same_keys(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in _written(tmp_path).read_text().splitlines()]
    assert [list(line) for line in lines] == [KEYS] * 4
    assert lines[1] == dict.fromkeys(KEYS) | {"step": 1, "loss": 4.0, "time_s": 1, "skipped_steps": 0}
    assert read_records(_written(tmp_path / "again")) == RECORDS
    assert read_records(tmp_path / "nothing") == []


def test_what_a_resumed_run_measures_again_is_dropped(tmp_path: Path) -> None:
    path = _written(tmp_path)
    drop_records_after(path, 2)
    assert read_records(path) == RECORDS[:3]
    append_record(path, RECORDS[3])
    assert read_records(path) == RECORDS
    path.write_text(path.read_text()[:-10])  # a last line that was cut off
    drop_records_after(path, 3)
    assert read_records(path) == RECORDS[:3]


def test_a_last_loss_that_is_not_finite_is_not_that_of_an_earlier_step() -> None:
    before, after = Record(step=0, held_out_loss=5.0, time_s=0), Record(step=3, held_out_loss=None, time_s=1)
    assert summary([before, after], 3, 2.0) == "held-out loss 5.000 -> not finite after 3 steps, 2 s"
    assert summary([after], 3, 2.0) == "held-out loss nan -> not finite after 3 steps, 2 s"


@pytest.mark.parametrize("line", ["nothing", "[1]", '{"step": 1, "other": 2}', "[" * 100_000, "\0"])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = _written(tmp_path)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"line 5 of .*metrics.jsonl is no record"):
        read_records(path)


@pytest.mark.optional
def test_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_records(RECORDS, tmp_path / "metrics.png")
    content = (tmp_path / "metrics.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content[-8:-4] == b"IEND"


@pytest.mark.optional
def test_tensorboard_has_a_curve_of_each_field(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Board(tmp_path, 0).add(Record(step=1, loss=4.0, time_s=1))
    Board(tmp_path, 0).add(Record(step=2, loss=3.0, lr=0.5, memory_bytes=7, time_s=2))
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in found.Scalars("loss")][-1] == (2, 3.0)
    assert set(found.Tags()["scalars"]) == {"loss", "lr", "memory_bytes", "time_s", "skipped_steps"}


def test_plain_lines_estimate_the_time_left() -> None:
    out = io.StringIO()
    display = Display(1000, Console(file=out, force_terminal=False))
    for step in range(3):
        display.update(Record(step=step, loss=1.0, time_s=step))
        time.sleep(0.01)
    first, *_, last = out.getvalue().splitlines()
    assert first == "step 0  loss 1.000"
    assert re.fullmatch(r"step 2  loss 1\.000  0:00:\d\d left", last)


INF = float("inf")
FIRST = "the first gradient that is not finite is that of"


def _describe(broken: dict[str, list[int]], losses: list[float]) -> str:
    """Describe gradients that are infinite in the rows of some ranks, and losses of ranks."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    for unit in (*model, model):
        fully_shard(unit)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        assert isinstance(parameter.grad, DTensor)
        if world.rank in broken.get(name, []):
            parameter.grad.to_local()[0] = INF
    return describe_nonfinite(model, torch.tensor(losses[world.rank]), world)


@pytest.mark.parametrize(
    ("broken", "losses", "said"),
    [
        ({}, [1.0, INF], "the loss of rank 1 is inf; all gradients are finite"),
        ({}, [1.0, 1.0], "all gradients are finite, but not their norm"),
        (
            {"0.weight": [0, 1], "1.0.bias": [1], "1.0.weight": [0]},
            [1.0, 1.0],
            f"{FIRST} unit 1, 1.0.bias, in rows of rank 1",
        ),
        (
            {"0.bias": [0, 1], "2.weight": [0, 1]},
            [-INF, 1.0],
            f"the loss of rank 0 is -inf; {FIRST} unit 2, 2.weight, in rows of rank 0, 1",
        ),
    ],
)
def test_what_is_not_finite_is_named(broken: dict[str, list[int]], losses: list[float], said: str) -> None:
    assert run_ranks(_describe, broken, losses) == [said] * 2
