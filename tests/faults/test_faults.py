"""What the healthy rank of two says when the other one fails: the table of docs/faults.md."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
TIMEOUT_S = 10.0
"""Of all groups: ranks that a busy machine starts seconds apart wait for each other as long."""
ALLOWED_S = 150.0
"""Torch's own timeout is 30 minutes; starting the program, which a busy machine takes its time for, is included."""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _start(rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _healthy_rank(fault: str, way: str) -> str:
    """What rank 0 prints; and to standard output, how many seconds after the fault it has ended."""
    port = _free_port()
    ranks = [_start(rank, port, fault, way, str(TIMEOUT_S)) for rank in range(2)]
    try:
        out, _ = ranks[0].communicate(timeout=ALLOWED_S)
        ended_s = time.time()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    begun = re.search(r"fault at ([\d.]+)", out)
    assert begun is not None, out
    print(out, f"\n{fault}, {way}: ended {ended_s - float(begun[1]):.1f} s after the fault")
    assert ranks[0].returncode == 1, "it ends by an error"
    return out


FAULTS = {
    "raises first": r"rank 1 failed: ValueError: a row of this rank's data is broken",
    "raises later": r"rank 1 failed: ValueError: a row of this rank's data is broken",
    "killed first": r"rank 1 (does not answer|did not make a process group within 10 s)",
    "killed later": r"rank 1 does not answer",
    "stopped first": r"rank 1 (does not answer|did not make a process group within 10 s)",
    "stopped later": r"rank 1 does not answer",
}
COMPILED = {
    "wrong option": r"rank 1 failed: (fsdp_compile.errors.)?ConfigError: (?s:.)*prefetch",
    "broken fake": r"rank 1 failed: (?s:.)*this fake implementation is broken",
    "leaves a step out": r"rank 1 (does not answer|did not)",
}
ALWAYS = [("killed later", "compiled")]
CASES = [*((fault, "compiled") for fault in (*FAULTS, *COMPILED)), *((fault, "uncompiled") for fault in FAULTS)]


@pytest.mark.parametrize(
    ("fault", "way"), [pytest.param(*case, marks=[] if case in ALWAYS else [pytest.mark.long]) for case in CASES]
)
def test_the_other_rank_is_blamed_within_the_timeout(fault: str, way: str) -> None:
    out = _healthy_rank(fault, way)
    assert re.search((FAULTS | COMPILED)[fault], out), out
    assert "RankFailedError" in out
