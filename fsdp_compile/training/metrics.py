"""Measurements of a run: as JSON lines, as a progress bar or plain lines while it runs, and as a loss curve."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_compile.errors import ConfigError
from fsdp_compile.lower.progress import LOGGER as COMPILES


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of metrics. None where nothing was measured at this step.

    Attributes:
        step: Steps done; 0 is before training.
        loss: Mean over the global batch of this step, nats per byte.
        held_out_loss: Mean over the held-out batches after this step, nats per byte.
        grad_norm: Norm of all gradients together before clipping.
        tokens_per_s: Over all ranks, training alone, since the record before.
        time_s: Seconds since this process began the run or resumed it.
        skipped_steps: Steps since then that updated nothing, because a loss or a gradient was not finite.
    """

    step: int
    loss: float | None = None
    held_out_loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    time_s: float
    skipped_steps: int = 0


def append_record(path: Path, record: Record) -> None:
    """Add a line; it is on disk when this returns, for readers that follow the file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_records(path: Path) -> list[Record]:
    """All whole lines of a file, none where there is no file. A run that was killed may have cut off the last.

    Raises:
        ConfigError: A line is no record.
    """
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    return [_record(path, number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]


def _record(path: Path, number: int, line: str) -> Record:
    try:
        return Record(**json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"line {number} of {path} is no record of a run: {error}", where="metrics", instead="delete the line"
        ) from None


def drop_records_after(path: Path, step: int) -> None:
    """Remove what was measured after the checkpoint of `step`: a resumed run measures it again."""
    kept = [record for record in read_records(path) if record.step <= step]
    aside = path.with_suffix(".partial")  # whatever interrupts this, no earlier line is lost
    aside.write_text("".join(json.dumps(asdict(record)) + "\n" for record in kept))
    aside.replace(path)


def held_out_losses(records: Iterable[Record]) -> list[tuple[int, float]]:
    """Steps and held-out losses where there are any."""
    return [(record.step, record.held_out_loss) for record in records if record.held_out_loss is not None]


LINE_EVERY_S = 10.0


class Display(Protocol):
    """Where a run shows how it goes."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def update(self, record: Record) -> None:
        """Show how far the run is."""


class Silence:
    """The display of every rank but the first."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def update(self, record: Record) -> None:
        """Show nothing."""


class Lines:
    """Plain lines, for logs: at least every `LINE_EVERY_S` seconds and at every held-out loss."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line at once, also into a pipe."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def update(self, record: Record) -> None:
        """Print how far the run is, if a line is due."""
        now_s = time.monotonic()
        if record.held_out_loss is not None or now_s - self._last_s >= LINE_EVERY_S:
            self._last_s = now_s
            self.say(f"step {record.step}  {describe(record)}")


class Bar:
    """A progress bar below the lines that stay."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=steps, what="compiling")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def compiling(self, stage: str) -> None:
        """Show what takes so long."""
        self._progress.update(self._task, what=stage)

    def update(self, record: Record) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=record.step, what=describe(record))


class _Stages(logging.Handler):
    """Shows the stages of compiles beside a bar."""

    def __init__(self, bar: Bar) -> None:
        super().__init__(logging.INFO)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        """Show one."""
        self._bar.compiling(record.getMessage())


@contextmanager
def _stages_of_compiles_in(bar: Bar) -> Iterator[None]:
    handler, level = _Stages(bar), COMPILES.level
    COMPILES.addHandler(handler)
    COMPILES.setLevel(logging.INFO)
    try:
        yield
    finally:
        COMPILES.removeHandler(handler)
        COMPILES.setLevel(level)


def describe(record: Record) -> str:
    """Losses and pace of a record in one line."""
    parts = []
    if record.loss is not None:
        parts.append(f"loss {record.loss:.3f}")
    if record.held_out_loss is not None:
        parts.append(f"held-out {record.held_out_loss:.3f}")
    if record.tokens_per_s is not None:
        parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
    return "  ".join(parts)


@contextmanager
def open_display(steps: int) -> Iterator[Display]:
    """The display of the first rank: a bar where standard output is a terminal, else lines."""
    console = Console()
    if not console.is_terminal:
        yield Lines()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[what]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = Bar(progress, steps)
        with _stages_of_compiles_in(bar):
            yield bar


def plot_losses(records: Sequence[Record], path: Path) -> bool:
    """Draw training and held-out loss over steps into a PNG; returns `False` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    # The object interface draws without a display and without global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per byte)")
    training = [(record.step, record.loss) for record in records if record.loss is not None]
    held_out = held_out_losses(records)
    axes.plot(*zip(*training, strict=True), linewidth=1, label="training batch")
    axes.plot(*zip(*held_out, strict=True), marker="o", label="held-out text")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    return True
