"""`fsdp-compile` with the transformed graphs run op by op, and with trouble on demand.

Ranks are spawned, so each imports this file before it trains and has the same trouble:

    PAUSE_AT=3      every rank stops in step 3 until somebody ends it
    FAIL_AT=3       rank 1 raises in step 3
"""

from __future__ import annotations

import functools
import os
import sys
import time

import torch

from fsdp_compile.cli.main import main
from fsdp_compile.training.trainer import StepResult, Trainer

PAUSE_AT = int(os.environ.get("PAUSE_AT", "0"))
FAIL_AT = int(os.environ.get("FAIL_AT", "0"))

torch.compile = functools.partial(torch.compile, options={"lower": "eager"})
_step = Trainer.step


def _troubled_step(self: Trainer, step: int) -> StepResult:
    if step == PAUSE_AT:
        if self.world.rank == 0:  # which writes the metrics: another rank may be in this step before they are written
            print("paused", flush=True)
        time.sleep(600)
    if step == FAIL_AT and self.world.rank == 1:
        raise RuntimeError("trouble on demand")
    return _step(self, step)


Trainer.step = _troubled_step  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
