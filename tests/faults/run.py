"""Runs a program with a fault, and measures when all of its ranks have ended and whether the cause was named."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.listed import Fault, Start
from tests.training.command import DRIVER, ROOT, TEXT, TINY

TIMEOUT_S = 10.0
"""Of all groups: ranks that a busy machine starts seconds apart wait for each other as long."""
ENDS_WITHIN_S = TIMEOUT_S + 5
_LAST_LINES = 60
"""Of `fsdp-compile train`: a traceback may be among them."""
_ALLOWED_S = 150.0
"""Torch's own timeout is 30 minutes; starting the program, which a busy machine takes its time for, is included."""
_GONE_WITHIN_S = 1.0
"""After the launcher."""
_PROGRAM = str(Path(__file__).with_name("program.py"))
_TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run with a fault has ended."""

    # Seconds from the fault, when both ranks had come to it, to the end of all processes; `None` if some had to
    # be killed.
    ended_s: float | None
    failed: bool  # whether the launcher, or rank 0 where there is none, has ended by an error
    named: bool  # whether the cause was named where it has to be
    output: str  # of all

    @property
    def is_in_time(self) -> bool:
        """Whether all ranks ended by an error within the timeout and 5 s."""
        return self.failed and self.ended_s is not None and self.ended_s <= ENDS_WITHIN_S

    @property
    def is_good(self) -> bool:
        """Whether they also said why."""
        return self.is_in_time and self.named


def run(fault: Fault, folder: Path) -> Outcome:
    if fault.start is Start.ALONE:
        return _run_alone(fault, folder)
    if fault.start is Start.TORCHRUN:
        return _run_launcher(fault, [*_TORCHRUN, *_arguments(fault)], folder)
    (folder / "text").write_bytes(TEXT)
    options = ["--timeout", str(TIMEOUT_S), "--ranks", "2", "--out", "run"]
    return _run_launcher(fault, [DRIVER, "train", *TINY, *options], folder, **{fault.name: "3"})


def _arguments(fault: Fault) -> list[str]:
    return [_PROGRAM, fault.name, str(TIMEOUT_S)]


def _run_alone(fault: Fault, folder: Path) -> Outcome:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
    outputs = [folder / f"output-{rank}" for rank in range(2)]
    ranks = [_start(_arguments(fault), output, **world, RANK=str(rank)) for rank, output in enumerate(outputs)]
    ending = ranks[:1] if fault.stays else ranks
    try:
        ended = _ended(ending)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = outputs[0].read_text()
    return _outcome(fault, said + outputs[1].read_text(), said, ended, failed=ranks[0].returncode > 0)


def _run_launcher(fault: Fault, arguments: Sequence[str], folder: Path, **environment: str) -> Outcome:
    output = folder / "output"
    launcher = _start(arguments, output, **environment)
    left: list[int] = []
    try:
        ended = _ended([launcher])
        time.sleep(_GONE_WITHIN_S)
    finally:
        launcher.kill()
        launcher.wait()
        processes = re.findall(r"^process (\d+)$", output.read_text(), re.MULTILINE)
        left += filter(_is_alive, map(int, processes))
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    text = output.read_text()
    return _outcome(fault, text, _last_lines(text), None if left else ended, failed=launcher.returncode > 0)


def _last_lines(text: str) -> str:
    """What a launcher says at the end: of torchrun all that it says of the first failure, a long traceback maybe."""
    _, is_of_torchrun, said = text.rpartition("Root Cause (first observed failure):")
    return said if is_of_torchrun else "\n".join(text.splitlines()[-_LAST_LINES:])


def _start(arguments: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=output.parent,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"} | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _ended(processes: Sequence[subprocess.Popen[bytes]]) -> float | None:
    """The time when all had ended; `None` if they did not in the time that is allowed."""
    end_s = time.monotonic() + _ALLOWED_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end_s:
            return None
        time.sleep(0.05)
    return time.time()


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _outcome(fault: Fault, output: str, said: str, ended: float | None, *, failed: bool) -> Outcome:
    begun = [float(found) for found in re.findall(r"^fault at ([\d.]+)$", output, re.MULTILINE)]
    ended_s = ended - max(begun) if begun and ended is not None else None
    is_of_rank_1 = re.search(r"rank +: 1 \(local_rank: 1\)", said) is not None
    own = fault.own is not None and is_of_rank_1 and re.search(fault.own, said) is not None
    return Outcome(ended_s, failed, own or re.search(fault.told, said) is not None, output)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])
