"""Shards that are sent in 8 bits: `fsdp::block_scales`, `fsdp::quantize` and `fsdp::dequantize`.

A shard is cut into blocks of `BLOCK` elements. A block whose largest magnitude is `m` has the scale `s = m / top`, a
float32, where `top` is the largest number of the 8-bit dtype (127, or 448 for float8_e4m3fn); an element `x` is sent as
`x / s` rounded to the nearest number that the dtype has. The result is off by at most

    int8            m / 254                  numbers are 1 apart, so rounding is off by 1/2, times s = m / 127
    float8_e4m3fn   max(|x| / 16, m / 2**18) 3 bits of mantissa: half of 2**-3 of the power of two at or below |x / s|;
                                             below 2**-6 numbers are 2**-9 apart: 2**-10 * m / 448 < m / 2**18
                    at most m / 28           numbers are 32 apart up to 448: 16 * m / 448

up to float32's own rounding (a factor of 1 + 2**-15), and before the cast to `param_dtype`. Blocks with `m` below 1e-35
become zeros; a block with an infinity or a NaN becomes NaN, in all of its elements. The gradient is not quantized.
"""

from __future__ import annotations

import torch

BLOCK = 128
"""Elements that share one scale; a slot of 8-bit elements starts and ends at a multiple of it."""
SCALE_BYTES = 4
SUPPORTED = (torch.int8, torch.float8_e4m3fn)
_TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST = 1e-35
"""Largest magnitude of a block that is sent as zeros: scales stay normal numbers of float32."""
_ALIGNMENT_BYTES = 128


def scale_message_bytes(numel: int) -> int:
    """Size of the message with the scales of `numel` elements (a multiple of `BLOCK`), padding included."""
    return -(-numel // BLOCK * SCALE_BYTES // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@torch.library.custom_op("fsdp::block_scales", mutates_args=())
def block_scales(shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scales of a shard.

    Args:
        shard: `[n]`, floating-point, `n` a multiple of `BLOCK`.
        dtype: One of `SUPPORTED`.

    Returns:
        uint8, `[scale_message_bytes(n)]`: `n / BLOCK` numbers of float32, and zeros as padding.
    """
    largest = shard.view(-1, BLOCK).abs().amax(1).float()
    scales = torch.where(largest < _SMALLEST, 0.0, largest / _TOP[dtype])
    message = scales.new_zeros(scale_message_bytes(shard.numel()) // SCALE_BYTES)
    message[: scales.numel()] = scales
    # Bytes, as the elements: one grouped all-gather takes both whatever the dtype.
    return message.view(torch.uint8)


@block_scales.register_fake
def _(shard: torch.Tensor, _dtype: torch.dtype) -> torch.Tensor:
    return shard.new_empty(scale_message_bytes(shard.numel()), dtype=torch.uint8)


@torch.library.custom_op("fsdp::quantize", mutates_args=())
def quantize(shard: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a shard, in 8 bits each.

    Args:
        shard: `[n]`, floating-point.
        scales: Of the shard, from `block_scales`.
        dtype: One of `SUPPORTED`.

    Returns:
        uint8, `[n]`: the bytes of numbers of `dtype`.
    """
    blocks = shard.view(-1, BLOCK).float()
    each = scales.view(torch.float32)[: blocks.shape[0], None]
    scaled = torch.where(each == 0, 0.0, blocks / each)
    if dtype is torch.int8:
        scaled = scaled.nan_to_num(0.0).round()  # the scale of such a block is not finite: its elements become NaN
    # Rounding may lead beyond the largest number, which is not representable.
    return scaled.clamp(-_TOP[dtype], _TOP[dtype]).to(dtype).view(torch.uint8).view(-1)


@quantize.register_fake
def _(shard: torch.Tensor, _scales: torch.Tensor, _dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(shard, dtype=torch.uint8)


@torch.library.custom_op("fsdp::dequantize", mutates_args=())
def dequantize(
    gathered: torch.Tensor, scales: torch.Tensor, sent: torch.dtype, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """The shards of all ranks, out of the two gathered messages.

    Args:
        gathered: uint8, `[size * n]`: `quantize` of each rank, rank after rank.
        scales: uint8, `[size * scale_message_bytes(n)]`: `block_scales` of each rank.
        sent: Dtype of the 8-bit numbers.
        size: Number of ranks.
        dtype: Dtype of the result.

    Returns:
        `[size * n]`.
    """
    blocks = gathered.view(sent).view(size, -1, BLOCK).float()
    each = scales.view(torch.float32).view(size, -1)[:, : blocks.shape[1], None]
    return (blocks * each).to(dtype).view(-1)


@dequantize.register_fake
def _(sent: torch.Tensor, _scales: torch.Tensor, _sent: torch.dtype, _size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(sent, dtype=dtype)


BLOCK_SCALES = torch.ops.fsdp.block_scales.default
QUANTIZE = torch.ops.fsdp.quantize.default
DEQUANTIZE = torch.ops.fsdp.dequantize.default
