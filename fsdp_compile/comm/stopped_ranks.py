"""Ranks that are stopped keep torch's launcher waiting: it asks them to end, which they do when they go on."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def continue_stopped_ranks() -> None:
    """Lets ranks that a signal has stopped go on, for this one ends: else their launcher waits for them, 30 s.

    Without torch's launcher nothing is done: nobody would end them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        for process in _stopped_children(os.getppid()):
            with contextlib.suppress(ProcessLookupError):  # it was ended meanwhile
                os.kill(process, signal.SIGCONT)


def _stopped_children(parent: int) -> list[int]:
    """The processes that a process has started and a signal has stopped; those of a launcher are its ranks."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone since the folder was listed
            state, of = stat.read_text().rpartition(")")[2].split()[:2]
            if state == "T" and int(of) == parent:
                found.append(int(stat.parent.name))
    return found
