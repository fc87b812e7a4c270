"""How a program of these tests runs, and says what it found to the test that started it."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist


def run(main: Callable[..., None]) -> None:
    """Calls it with the arguments of the command line, and destroys the process group."""
    main(*sys.argv[1:])
    # DDP's reducer goes first: as the last owner of a group it waits for gloo's thread, with the interpreter's lock
    # taken, and that thread for the lock, if it frees a tensor then (torch 2.13: such programs hung at their end).
    gc.collect()
    dist.destroy_process_group()


def report(found: list[dict[str, float]]) -> None:
    """Writes it, on the first rank, to the file that the test named."""
    if dist.get_rank() == 0:
        Path(os.environ["REPORT"]).write_text(json.dumps(found))
