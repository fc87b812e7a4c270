"""`fsdp-compile` with the transformed graphs run op by op, and with trouble on demand.

Ranks are spawned, so each imports this file before it trains and has the same trouble:

    PAUSE_AT=3      every rank stops in step 3 until somebody ends it
    FAIL_AT=3       rank 1 raises in step 3
    FULL_AT=3       the disk of rank 1 is full from step 3 on
    KILL_AT=3       rank 1 is killed in step 3
    STOP_AT=3       rank 1 is stopped in step 3
    NAN_AT=3        a parameter of rank 1 is not a number from step 3 on
    TROUBLES=2      all this also after the first restart, and not only before it

Each rank prints its process, and the time when it comes to the trouble.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import sys
import time

import torch

from fsdp_compile.cli.main import main
from fsdp_compile.training.trainer import Trainer
from tests.training.small_run import full_disk

PAUSE_AT = int(os.environ.get("PAUSE_AT", "0"))
FAIL_AT = int(os.environ.get("FAIL_AT", "0"))
FULL_AT = int(os.environ.get("FULL_AT", "0"))
NAN_AT = int(os.environ.get("NAN_AT", "0"))
SIGNALS = {int(os.environ.get("KILL_AT", "0")): signal.SIGKILL, int(os.environ.get("STOP_AT", "0")): signal.SIGSTOP}

torch.compile = functools.partial(torch.compile, options={"lower": "eager"})
_step = Trainer.step
_troubles = contextlib.ExitStack()


def _troubled_step(self: Trainer, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Set when a rank runs, after it has imported this.
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) >= int(os.environ.get("TROUBLES", "1")):
        return _step(self, step)
    if step == PAUSE_AT:
        if self.world.rank == 0:  # which writes the metrics: another rank may be in this step before they are written
            print("paused", flush=True)
        time.sleep(600)
    if step in (FAIL_AT, FULL_AT, NAN_AT, *SIGNALS):
        print(f"process {os.getpid()}\nfault at {time.time()}", flush=True)
    if step == FAIL_AT and self.world.rank == 1:
        raise RuntimeError("trouble on demand")
    if step in SIGNALS and self.world.rank == 1:
        os.kill(os.getpid(), SIGNALS[step])
    if step == NAN_AT and self.world.rank == 1:
        with torch.no_grad():
            list(self.model.parameters())[-1].fill_(math.nan)  # not of an embedding, whose rows need not be read
    if step == FULL_AT:
        _troubles.enter_context(full_disk("__1_0.distcp"))
    return _step(self, step)


Trainer.step = _troubled_step  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
