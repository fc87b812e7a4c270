"""Copies between host and device, for shards on the host (CPU offload).

    slice(%flat), cast, all_gather   ->   slice(%flat), start_copy to the device, wait_copy, cast, all_gather
    join(...) is the flat gradient   ->   join(...), start_copy to the host, wait_copy is the flat gradient

The flat parameter itself is copied, and cast on the device: it is pinned, so that the copy overlaps computation, while
a narrow copy made on the host would be pageable and cost the launching thread a pass over memory. Gradients are joined
on the device, so that one copy per flat parameter goes back. Waiting for it blocks the stream, not the host, so nothing
in the graph reads it: the host waits once, at the end of backward (`lower/wrappers.py`).

Here each wait stands right behind its start; `schedule_prefetch.py`, `schedule_reduce.py` and `schedule_auto.py` move
them apart.
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.graph import Role
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec
from fsdp_compile.ops.host_copy import START_COPY, WAIT_COPY

aten = torch.ops.aten


def copy_in(b: GraphBuilder, message: fx.Node, spec: UnshardSpec) -> fx.Node:
    """Records the copy of a slice of the flat parameter to the device; `message` itself if it is there."""
    if not spec.compute:
        return message
    with b.as_role(Role.OFFLOAD_IN):
        copied = b.call(START_COPY, message, spec.compute)
    with b.as_role(Role.OFFLOAD_IN_WAIT):
        return b.call(WAIT_COPY, copied)  # nothing writes to the flat parameter while the graph runs


def copy_out(b: GraphBuilder, gradient: fx.Node) -> fx.Node:
    """Records the copy of a flat gradient to the host if it belongs there; else `gradient` itself."""
    spec = b.record.specs[0]
    # Accumulated gradients that are not fully reduced stay on the device.
    if not spec.compute or spec.grad_placement is not GradPlacement.REDUCED:
        return gradient
    with b.as_role(Role.OFFLOAD_OUT):
        copied = b.call(START_COPY, gradient, "cpu")
    with b.as_role(Role.OFFLOAD_OUT_WAIT):
        waited = b.call(WAIT_COPY, copied, gradient)
    return b.call(aten.view.default, waited, list(b.value(waited).shape))
