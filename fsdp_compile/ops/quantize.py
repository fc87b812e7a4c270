"""Shards that are sent in 8 bits or fewer, in the format of the name `wire`; the gradient is not quantized.

    block_scales(shard, wire)                             floating-point [n] -> uint8 [scale_message_bytes(n)]
    quantize(shard, scales, wire)                         -> uint8 [n / per_byte]
    dequantize(gathered, scales, wire, size, dtype)       both messages of `size` ranks, rank after rank -> [size * n]

`n` is a multiple of the format's block. Scales are bytes, as the elements, so that one grouped all-gather takes both.
`layout/wire_formats.py` has the formats and their errors.
"""

from __future__ import annotations

import torch

from fsdp_compile.layout.messages import EAGER
from fsdp_compile.layout.wire_formats import FORMATS


@torch.library.custom_op("fsdp_compile::block_scales", mutates_args=())
def block_scales(shard: torch.Tensor, wire: str) -> torch.Tensor:
    """The scales of a shard."""
    return FORMATS[wire].scales(shard)


@block_scales.register_fake
def _(shard: torch.Tensor, wire: str) -> torch.Tensor:
    return shard.new_empty(FORMATS[wire].scale_message_bytes(shard.numel()), dtype=torch.uint8)


@torch.library.custom_op("fsdp_compile::quantize", mutates_args=())
def quantize(shard: torch.Tensor, scales: torch.Tensor, wire: str) -> torch.Tensor:
    """The elements of a shard with these scales."""
    return FORMATS[wire].elements(shard, scales)


@quantize.register_fake
def _(shard: torch.Tensor, _scales: torch.Tensor, wire: str) -> torch.Tensor:
    return shard.new_empty(shard.numel() // FORMATS[wire].per_byte, dtype=torch.uint8)


@torch.library.custom_op("fsdp_compile::dequantize", mutates_args=())
def dequantize(gathered: torch.Tensor, scales: torch.Tensor, wire: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The shards of all ranks, out of the two gathered messages."""
    return FORMATS[wire].decoded(EAGER, gathered, scales, size).to(dtype).view(-1)


@dequantize.register_fake
def _(gathered: torch.Tensor, _scales: torch.Tensor, wire: str, _size: int, dtype: torch.dtype) -> torch.Tensor:
    return gathered.new_empty(gathered.numel() * FORMATS[wire].per_byte, dtype=dtype)


BLOCK_SCALES = torch.ops.fsdp_compile.block_scales.default
QUANTIZE = torch.ops.fsdp_compile.quantize.default
DEQUANTIZE = torch.ops.fsdp_compile.dequantize.default
