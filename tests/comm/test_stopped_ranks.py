"""A rank that ends lets the stopped ranks of its launcher go on, and no other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_compile.comm.failures import continue_stopped_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
_OF_A_SHELL = "sleep 600 & kill -STOP $!; echo $!; wait"


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def _wait_for(process: int, states: str) -> None:
    end_s = time.monotonic() + 10
    while _state(process) not in states:
        assert time.monotonic() < end_s, f"{process} is {_state(process)}, not {states}"
        time.sleep(0.01)


def test_stopped_processes_of_the_launcher_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # this process is the launcher
    with (
        subprocess.Popen(["sleep", "600"]) as rank,
        subprocess.Popen(["sh", "-c", _OF_A_SHELL], stdout=subprocess.PIPE, text=True) as shell,
    ):
        assert shell.stdout is not None
        other = int(shell.stdout.readline())
        try:
            rank.send_signal(signal.SIGSTOP)
            _wait_for(rank.pid, "T")
            _wait_for(other, "T")
            monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
            continue_stopped_ranks()
            assert _state(rank.pid) == "T", "there is no launcher"
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this run")
            continue_stopped_ranks()
            _wait_for(rank.pid, "RS")
            assert _state(other) == "T", "of another parent"
        finally:
            rank.kill()
            os.kill(other, signal.SIGKILL)
