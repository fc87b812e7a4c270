"""What the first rank says while a model compiles: its form, and each stage when it begins, and how long it has taken.

    Llama is compiled as a whole: it has fewer than 12 like units
    region 0: tracing forward and backward
    region 0: passes over the forward graph (1 of 2)
    region 0: passes over the forward graph (1 of 2) took 0.4 s

The logger `fsdp_compile.progress` says it at INFO: nothing is shown unless the user asks. `fsdp-compile train` shows it
beside its bar, on a terminal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist

LOGGER: Final = logging.getLogger("fsdp_compile.progress")


def say(what: str) -> None:
    """Says on the first rank what begins."""
    if _is_asked_for():
        LOGGER.info("%s", what)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Says on the first rank what begins, and when it is done."""
    if not _is_asked_for():
        yield
        return
    LOGGER.info("%s", what)
    start_s = time.perf_counter()
    yield
    LOGGER.info("%s took %.1f s", what, time.perf_counter() - start_s)


def _is_asked_for() -> bool:
    return LOGGER.isEnabledFor(logging.INFO) and (not dist.is_initialized() or dist.get_rank() == 0)
