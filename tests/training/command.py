"""Starts `fsdp-compile train` as a user does, in processes of its own, and looks at what it leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DRIVER = str(Path(__file__).with_name("driver.py"))
TEXT = b"the rank holds a shard of every weight and gathers it before it is read again, then lets it go. " * 40
TINY = shlex.split(
    "--data text --steps 6 --batch-size 4 --seq-len 32 --width 32 --layers 1 --warmup-ratio 0.34"
    " --log-every 1 --eval-every 3 --eval-batches 1 --checkpoint-every 2"
)
TIMEOUT_S = 400


def start(folder: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """Start a Python program in a folder that holds the text, as the leader of a process group."""
    (folder / "text").write_bytes(TEXT)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_interrupts,  # noqa: PLW1509  it takes no lock
    )


def _hear_interrupts() -> None:
    """A job in the background of a shell ignores SIGINT, and so would the programs that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, standard output and error of a program; nothing of it is left, whatever happens."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    print(out, err)
    return process.returncode, out, err


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for read in process.stdout:
        if read.strip() == line:
            return
    raise AssertionError(f"ended without {line}: {finish(process)}")


def session_of(process: subprocess.Popen[str], *, within_s: float = 10) -> list[str]:
    """Command lines of living processes of the session that `process` leads, after they had time to go."""
    deadline_s = time.monotonic() + within_s
    while (found := _living(process.pid)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found


def _living(session: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, of_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                found.append(stat.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # gone since the folder was listed
            continue
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
