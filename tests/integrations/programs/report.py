"""What a program of these tests found, for the test that started it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist


def report(found: list[dict[str, float]]) -> None:
    """Writes it, on the first rank, to the file that the test named."""
    if dist.get_rank() == 0:
        Path(os.environ["REPORT"]).write_text(json.dumps(found))
    dist.barrier()
