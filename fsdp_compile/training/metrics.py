"""What a run measured, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of metrics. None where nothing was measured at this step.

    Attributes:
        step: Steps done; 0 is before training.
        loss: Mean over the global batch of this step, nats per byte.
        held_out_loss: Mean over the held-out batches after this step, nats per byte.
        grad_norm: Norm of all gradients together before clipping.
        lr: Learning rate of this step.
        tokens_per_s: Over all ranks, training alone, since the record before.
        time_s: Seconds since this process began the run or resumed it.
    """

    step: int
    loss: float | None = None
    held_out_loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    time_s: float


def append_record(path: Path, record: Record) -> None:
    """Add a line; it is on disk when this returns, for those who follow the file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_records(path: Path) -> list[Record]:
    """All whole lines of a file, none where there is no file. A run that was killed may have cut off the last."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [Record(**json.loads(line)) for line in lines if line.endswith("\n")]


def drop_records_after(path: Path, step: int) -> None:
    """Remove what was measured after a checkpoint: a resumed run measures it again.

    Args:
        path: A file of metrics.
        step: The step of the checkpoint.
    """
    kept = [record for record in read_records(path) if record.step <= step]
    aside = path.with_suffix(".partial")  # whatever interrupts this, no earlier line is lost
    aside.write_text("".join(json.dumps(asdict(record)) + "\n" for record in kept))
    aside.replace(path)


def held_out_losses(records: Iterable[Record]) -> list[tuple[int, float]]:
    """Steps and held-out losses where there are any."""
    return [(record.step, record.held_out_loss) for record in records if record.held_out_loss is not None]
