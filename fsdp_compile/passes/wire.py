"""What each rank sends of a piece of its flat shard, and how what has arrived is read.

as it is      slice, cast                         ->  one message   ->  the message itself
quantized     slice, block_scales, quantize       ->  two messages  ->  dequantize

A slice of a shard that lives on the host is copied to the device first (`offload.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from fsdp_compile.ir.edit import GraphBuilder
from fsdp_compile.ir.record import Role
from fsdp_compile.parameters import assemble, quantize  # noqa: F401  registers fsdp::quantize
from fsdp_compile.parameters.spec import ReadSpec
from fsdp_compile.passes.offload import copy_in

BLOCK_SCALES = torch.ops.fsdp.block_scales.default
QUANTIZE = torch.ops.fsdp.quantize.default
DEQUANTIZE = torch.ops.fsdp.dequantize.default


def messages(b: GraphBuilder, flat: fx.Node, begin: int, span: int, spec: ReadSpec) -> list[fx.Node]:
    """Records the messages that hold `flat[begin : begin + span]`.

    Args:
        b: Writes before the all-gather, with roles SHARD and OFFLOAD_IN.
        flat: The flat shard.
        begin: First element.
        span: Number of elements.
        spec: Of the first slot that lies there; its dtypes are those of all of them.
    """
    shard = copy_in(b, assemble.narrow(b, flat, 0, begin, begin + span), spec)
    if spec.gather_dtype is None:
        return [assemble.cast(b, shard, spec.param_dtype)]
    scales = b.call(BLOCK_SCALES, shard, spec.gather_dtype)
    return [b.call(QUANTIZE, shard, scales, spec.gather_dtype), scales]


def received(b: GraphBuilder, arrived: Sequence[fx.Node], spec: ReadSpec) -> fx.Node:
    """Records how the gathered messages of a piece become `[size * span]` elements in the dtype that readers get."""
    if spec.gather_dtype is None:
        return arrived[0]
    with b.as_role(Role.COPY_OUT):
        return b.call(DEQUANTIZE, *arrived, spec.gather_dtype, spec.size, spec.param_dtype)
