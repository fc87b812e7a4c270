"""What a run shows while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fsdp_compile.training.metrics import Record

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
    """A progress bar below the lines that stay.

    Args:
        progress: A started bar.
        steps: Steps in all.
    """

    def __init__(self, progress: Progress, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task("training", total=steps, what="compiling")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def update(self, record: Record) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=record.step, what=describe(record))


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
    """A bar where standard output is a terminal, lines where it is not.

    Args:
        steps: Steps in all.

    Yields:
        The display of the first rank.
    """
    console = Console()
    if not console.is_terminal:
        yield Lines()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[what]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield Bar(progress, steps)
