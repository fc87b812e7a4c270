"""Copies between host and device, for shards that live on the host (CPU offload).

    slice(%flat), cast, all_gather   ->   slice(%flat), copy to the device, cast, all_gather
    join(...) is the flat gradient   ->   join(...), copy to the host is the flat gradient

The flat shard itself is copied, and cast on the device: it is pinned, so that the copy runs beside computation, while
a narrow copy made on the host would be pageable and cost the launching thread a pass over memory. Gradients are joined
on the device, so that one copy per flat shard goes back. Nothing in the graph reads what was copied back: it may still
be on its way until the end of backward, when the host waits once (`lower/runtime.py`).
"""

from __future__ import annotations

import torch
from torch import fx

from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.record import Role
from fsdp_compile.parameters.spec import ReadSpec

aten = torch.ops.aten


def copy_in(b: GraphBuilder, message: fx.Node, spec: ReadSpec) -> fx.Node:
    """Records the copy of a slice of the flat shard to the device; `message` itself if it is there."""
    if not spec.compute:
        return message
    with b.as_role(Role.OFFLOAD_IN):
        return b.call(aten._to_copy.default, message, device=torch.device(spec.compute), non_blocking=True)


def copy_out(b: GraphBuilder, gradient: fx.Node, like: fx.Node) -> fx.Node:
    """Records the copy of a flat gradient to the host if it is to be there, as `like` is; else `gradient` itself."""
    if b.value(like).device.type == b.value(gradient).device.type:
        return gradient
    with b.as_role(Role.OFFLOAD_OUT):
        copied = b.call(aten._to_copy.default, gradient, device=torch.device("cpu"), non_blocking=True)
    return b.call(aten.view.default, copied, list(b.value(copied).shape))
