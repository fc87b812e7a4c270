"""Ranges in torch's profiler, one per parameter group and phase, under FSDP2's names.

    FSDP::all_gather (layers.3)
    FSDP::post_backward_reduce            of the outermost module, which has no name

Forwards and backwards that are not compiled have FSDP2's own. These cost nothing that can be measured while no
profiler runs: a range itself takes microseconds even then, so it is not made.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch.profiler import record_function

from fsdp_compile._torch.autograd import profiler_runs
from fsdp_compile.layout.spec import ROOT


class Range(enum.Enum):
    """What happens in a range."""

    ALL_GATHER = "FSDP::all_gather"
    """Starts an all-gather."""
    ALL_GATHER_COPY_OUT = "FSDP::all_gather_copy_out"
    """Waits for an all-gather."""
    REDUCE = "FSDP::post_backward_reduce"
    """Starts a reduce-scatter or all-reduce."""
    REDUCE_WAIT = "FSDP::post_backward_rs_wait"
    """Waits for a reduce-scatter or all-reduce."""


def profiled(what: Range, units: Sequence[str] = ()) -> AbstractContextManager[object]:
    """A range, if a profiler runs; `units` are the names of the units that it is for."""
    if not profiler_runs():
        return contextlib.nullcontext()
    names = ", ".join(name for name in units if name != ROOT)
    return record_function(f"{what.value} ({names})" if names else what.value)
