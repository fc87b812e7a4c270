"""The faults of docs/faults.md that end a job: how each is made, and what must be said of it."""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class Start(StrEnum):
    """How the ranks are started."""

    ALONE = "without a launcher"
    TORCHRUN = "torchrun"
    COMMAND = "fsdp-compile train"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of rank 1 of two."""

    name: str  # that of `program.py`, or the variable of `tests/training/driver.py`
    start: Start  # how the ranks are started
    told: str  # A pattern of what the other rank says, or the last lines of the launcher
    own: str | None = None  # A pattern of what the last lines of the launcher may say as well, if they are of rank 1
    stays: bool = False  # whether rank 1 is stopped, so that nothing but a launcher ends it

    def __str__(self) -> str:
        return f"{self.name}, {self.start}"


_ROW = "ValueError: a row of this rank's data is broken"
_MEMORY = r"RuntimeError: (?s:.)*can't allocate memory"
_GONE = r"rank 1 (does not answer|did not (make a process group|begin its first forward|come) within 10 s)"
_COMPILED: dict[str, tuple[str, str | None]] = {
    "raises first": (f"rank 1 failed: {_ROW}", _ROW),
    "raises later": (f"rank 1 failed: {_ROW}", _ROW),
    "out of memory first": (f"rank 1 failed: {_MEMORY}", _MEMORY),
    "out of memory later": (f"rank 1 failed: {_MEMORY}", _MEMORY),
    "killed first": (_GONE, r"Signal 9 \(SIGKILL\)"),
    "killed later": (_GONE, r"Signal 9 \(SIGKILL\)"),
    "stopped first": (_GONE, None),
    "stopped later": (_GONE, None),
    "other setting": (r"rank 0 and rank 1 compile different collectives(?s:.)*torch\.bfloat16.* on rank 1", None),
    "wrong option": (r"rank 1 failed: (fsdp_compile\.errors\.)?ConfigError: (?s:.)*prefetch", "prefetch"),
    "broken fake": (r"rank 1 failed: (?s:.)*this fake implementation is broken", "this fake implementation is broken"),
    # A rank that asks late finds that the other one has not only refused, but ended.
    "too small a budget": (r"rank 1 (refused to compile|failed): (?s:.)*budget", "budget"),
    "other order first": (r"rank 0 and rank 1 compile different collectives(?s:.)*layers\.", None),
    "other order later": (r"rank 0 did not compile its next collectives within 10 s", None),
    "leaves a step out": (r"rank 1 (does not answer|did not)", None),
}
_COMMAND: dict[str, tuple[str, str | None]] = {
    "FAIL_AT": (r"rank 1 failed(?s:.)*RuntimeError: trouble on demand", None),
    "KILL_AT": ("rank 1 was ended by SIGKILL", None),
    "STOP_AT": ("rank 1 does not answer", None),
    "FULL_AT": (r"CheckpointError: rank 1 cannot write .*: No space left on device", None),
    "NAN_AT": (r"rank 0 is nan", None),
}


FAULTS = [
    Fault(name, start, told, own, stays=name.startswith("stopped"))
    for start, said in ((Start.ALONE, _COMPILED), (Start.TORCHRUN, _COMPILED), (Start.COMMAND, _COMMAND))
    for name, (told, own) in said.items()
]
