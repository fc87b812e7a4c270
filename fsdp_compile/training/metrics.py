"""Measurements of a run: as JSON lines, as a progress bar or plain lines while it runs, and as curves."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_compile.errors import ConfigError
from fsdp_compile.progress import LOGGER as COMPILES


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of metrics. None where nothing was measured at this step, or it was not finite."""

    step: int  # done; 0 is before training
    loss: float | None = None  # mean over the global batch of this step, nats per byte
    held_out_loss: float | None = None  # mean over the held-out batches after this step, nats per byte
    grad_norm: float | None = None  # of all gradients together before clipping
    lr: float | None = None
    tokens_per_s: float | None = None  # over all ranks, training alone, since the record before
    memory_bytes: int | None = None  # most that a rank has had so far: of its device, or, on a CPU, resident
    time_s: float  # since this process began the run or resumed it
    skipped_steps: int = 0  # since then, where a loss or a gradient was not finite


def append_record(path: Path, record: Record) -> None:
    """Add a line; it is on disk when this returns, for readers that follow the file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_records(path: Path) -> list[Record]:
    """All whole lines of a file, none where there is no file; `ConfigError` if one is no record.

    A run that was killed may have cut off the last.
    """
    records = []
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            if line.endswith("\n"):
                records.append(Record(**json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            what = f"line {number} of {path} is no record of a run: {error}"
            raise ConfigError(what, where="metrics", instead="delete the line") from None
    return records


def drop_records_after(path: Path, step: int) -> None:
    """Remove what was measured after the checkpoint of `step`: a resumed run measures it again."""
    kept = [record for record in read_records(path) if record.step <= step]
    aside = path.with_suffix(".partial")  # whatever interrupts this, no earlier line is lost
    aside.write_text("".join(json.dumps(asdict(record)) + "\n" for record in kept))
    aside.replace(path)


def summary(records: Sequence[Record], steps: int, time_s: float) -> str:
    """One line: the held-out loss before and after a run."""
    before = next((each.held_out_loss for each in records if each.held_out_loss is not None), math.nan)
    after = records[-1].held_out_loss
    ended = f"after {steps} steps, {time_s:.0f} s"
    if after is None:  # the last one that there is would be that of an earlier step
        return f"held-out loss {before:.3f} -> not finite {ended}"
    bits = f"({before / math.log(2):.2f} -> {after / math.log(2):.2f} bits)"
    return f"held-out loss {before:.3f} -> {after:.3f} nats per byte {bits} {ended}"


class Display(logging.Handler):
    """Shows how a run goes: below the lines that stay a bar, or, where standard output is no terminal, more lines.

    As a handler of logs it shows the stages of compiles in the bar.
    """

    def __init__(self, steps: int, console: Console) -> None:
        super().__init__(logging.INFO)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[what]}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=console, disable=console.quiet or not console.is_terminal)
        self._task = self.bar.add_task("training", total=steps, what="compiling")

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self.bar.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Show what takes so long."""
        self.bar.update(self._task, what=record.getMessage())

    def update(self, record: Record) -> None:
        """Move the bar, or print a line."""
        found = {"loss": record.loss, "held-out": record.held_out_loss}
        parts = [f"{name} {value:.3f}" for name, value in found.items() if value is not None]
        if record.tokens_per_s is not None:
            parts.append(f"{record.tokens_per_s:,.0f} tokens/s")
        self.bar.update(self._task, completed=record.step, what="  ".join(parts))
        if self.bar.disable:
            if (left_s := self.bar.tasks[self._task].time_remaining) and record.step:
                parts.append(f"{timedelta(seconds=round(left_s))} left")
            self.say("  ".join([f"step {record.step}", *parts]))


@contextmanager
def open_display(steps: int, *, is_first: bool = True) -> Iterator[Display]:
    """The display of a rank: ranks other than the first show nothing."""
    display, level = Display(steps, Console(quiet=not is_first)), COMPILES.level
    if not display.bar.disable:
        COMPILES.addHandler(display)
        COMPILES.setLevel(logging.INFO)
    try:
        with display.bar:
            yield display
    finally:
        COMPILES.removeHandler(display)
        COMPILES.setLevel(level)


def plot_records(records: Sequence[Record], path: Path) -> bool:
    """Draw what was measured over steps into a PNG; returns `False` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return False
    # The object interface draws without a display and without global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7), layout="constrained")
    for axes, (label, names, scale) in zip(figure.subplots(2, 3, sharex=True).flat, _CURVES, strict=False):
        for name in names:
            measured = [(each.step, getattr(each, name)) for each in records if getattr(each, name) is not None]
            style = "o-" if name == "held_out_loss" else "-"
            axes.plot([step for step, _ in measured], [value * scale for _, value in measured], style, label=name)
        axes.set(xlabel="step", ylabel=label)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.axes[-1].set_axis_off()
    figure.savefig(path, dpi=150)
    return True


_CURVES = (
    ("nats per byte", ("loss", "held_out_loss"), 1.0),
    ("norm before clipping", ("grad_norm",), 1.0),
    ("learning rate", ("lr",), 1.0),
    ("tokens/s over all ranks", ("tokens_per_s",), 1.0),
    ("memory of a rank (MB)", ("memory_bytes",), 1e-6),
)
"""Axes of the picture: label, fields of a record, and scale."""


class Board:
    """The same for TensorBoard, where `tensorboard` is installed; a resumed run goes on in the same curves."""

    def __init__(self, folder: Path, done_steps: int) -> None:
        self._writer = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=done_steps + 1)

    def add(self, record: Record) -> None:
        """Write a point of each curve; it is on disk when this returns."""
        if self._writer is not None:
            for name, value in asdict(record).items():
                if value is not None and name != "step":
                    self._writer.add_scalar(name, value, record.step)
            self._writer.flush()
