"""How large parameters are sent in fewer bits than any floating-point dtype of 16: the formats, one class each.

A shard is cut into blocks whose elements share a scale. It is sent as two messages of bytes, its elements and its
scales, and every rank makes the same numbers of them. With `m` the largest magnitude of a block, an element `x` is off
by at most

    int8            m / 254                  numbers are 1 apart, so rounding is off by 1/2, times s = m / 127
    float8_e4m3fn   max(|x| / 16, m / 2**18) 3 bits of mantissa: half of 2**-3 of the power of two at or below |x / s|;
                                             below 2**-6 numbers are 2**-9 apart: 2**-10 * m / 448 < m / 2**18
                    at most m / 28           numbers are 32 apart up to 448: 16 * m / 448
    mxfp8           max(|x| / 16, m / 2**17) the same with s = m / 448 rounded up to a power of two, which is less than
                    at most m / 14           twice as much
    nvfp4           m * 17 / 96 + M / 2**18  numbers are 2 apart between 4 and 6: 1 * m / 6, whose scale is rounded to a
                                             4th bit (17 / 16); `M` is the largest magnitude of the rank's shard, below
                                             2**-18 of which scales are 0

up to float32's own rounding (a factor of 1 + 2**-15). A block with `m` below 1e-35 becomes zeros. An infinity or a NaN
makes all elements of its block NaN; with nvfp4, all of its rank's shard.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TypeVar

import torch

from fsdp_compile.layout.messages import Builder, cast, narrow, view
from fsdp_compile.layout.spec import UnshardSpec

T = TypeVar("T")
aten = torch.ops.aten
_SMALLEST = 1e-35
"""Largest magnitude of a block that is sent as zeros: scales stay normal numbers of float32."""
_ALIGNMENT_BYTES = 128


@dataclasses.dataclass(frozen=True)
class WireFormat(abc.ABC):
    """One way to send a shard of `n` floating-point numbers, `n` a multiple of `block` and of `per_byte`.

    Attributes:
        name: As it is written in specs and graphs.
        block: Elements that share a scale.
        scale_bytes: Of one block's scale.
        per_byte: Elements in a byte.
        shard_bytes: Of what is sent once for the whole shard, at the end of the message of scales.
    """

    name: str
    block: int
    scale_bytes: int
    per_byte: int = 1
    shard_bytes: int = 0

    @property
    def element_bytes(self) -> float:
        """Bytes of one element, and of its share of a scale."""
        return 1 / self.per_byte + self.scale_bytes / self.block

    def scale_message_bytes(self, numel: int) -> int:
        """Size of the message with the scales of `numel` elements, padding included."""
        needed = numel // self.block * self.scale_bytes + self.shard_bytes
        return -(-needed // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def scales(self, shard: torch.Tensor) -> torch.Tensor:
        """The message of scales, uint8 `[scale_message_bytes(n)]`: of all blocks, padding, what the shard shares."""
        message = shard.new_zeros(self.scale_message_bytes(shard.numel()), dtype=torch.uint8)
        self._write_scales(shard.view(-1, self.block).abs().amax(1).float(), message)
        return message

    @abc.abstractmethod
    def _write_scales(self, largest: torch.Tensor, message: torch.Tensor) -> None:
        """Fills the message of scales, of blocks whose largest magnitudes are `largest`, float32."""

    @abc.abstractmethod
    def elements(self, shard: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The message of elements, uint8 `[n / per_byte]`, of a shard and its message of scales."""

    @abc.abstractmethod
    def decoded(self, b: Builder[T], elements: T, scales: T, size: int) -> T:
        """The shards of `size` ranks in float32, `[size, n / block, block]`, out of both gathered messages."""

    def blocks(self, shard: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The elements of a shard over the scales of their blocks, `[n / block, block]` float32; 0 / 0 is 0."""
        return torch.where(scale[:, None] == 0, 0.0, shard.view(-1, self.block).float() / scale[:, None])

    def _times(self, b: Builder[T], numbers: T, scale: T, size: int) -> T:
        """Numbers in any shape times the scales of their blocks, `[size, n / block]`."""
        count = b.value(scale).shape[1]
        return b.call(
            aten.mul.Tensor, view(b, numbers, [size, count, self.block]), b.call(aten.unsqueeze.default, scale, 2)
        )

    def _of_ranks(self, b: Builder[T], scales: T, size: int, numel: int) -> T:
        """The bytes of all blocks' scales, `[size, n / block * scale_bytes]`, of `numel` elements on all ranks."""
        return narrow(b, view(b, scales, [size, -1]), 1, 0, numel // size // self.block * self.scale_bytes)


@dataclasses.dataclass(frozen=True)
class _Float32Scales(WireFormat):
    """Elements of an 8-bit dtype, with a float32 `m / top` for each block: 1.03 bytes an element.

    Attributes:
        dtype: Of the elements.
        top: The largest number that it has.
    """

    dtype: torch.dtype = torch.int8
    top: float = 127.0

    def _write_scales(self, largest: torch.Tensor, message: torch.Tensor) -> None:
        message.view(torch.float32)[: largest.numel()] = torch.where(largest < _SMALLEST, 0.0, largest / self.top)

    def elements(self, shard: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scaled = self.blocks(shard, scales.view(torch.float32)[: shard.numel() // self.block])
        if self.dtype is torch.int8:
            scaled = scaled.nan_to_num(0.0).round()  # the scale of such a block is not finite: its elements become NaN
        # Rounding may lead beyond the largest number, which is not representable.
        return scaled.clamp(-self.top, self.top).to(self.dtype).view(torch.uint8).view(-1)

    def decoded(self, b: Builder[T], elements: T, scales: T, size: int) -> T:
        numbers = cast(b, b.call(aten.view.dtype, elements, self.dtype), torch.float32)
        of_ranks = view(b, b.call(aten.view.dtype, scales, torch.float32), [size, -1])
        count = b.value(elements).numel() // size // self.block
        return self._times(b, numbers, narrow(b, of_ranks, 1, 0, count), size)


_FLOAT8_TOP = 448.0
_EXPONENT_BITS = 23
"""Bits of a float32 below its exponent."""
_NO_EXPONENT = 255
"""E8M0's NaN."""


@dataclasses.dataclass(frozen=True)
class _PowerOfTwoScales(WireFormat):
    """Open Compute's MXFP8: float8_e4m3fn, and for each block the exponent of its scale, a byte (E8M0).

    `m / 448` is rounded up, so that no element is beyond 448. A float32 of that exponent is the scale.
    """

    def _write_scales(self, largest: torch.Tensor, message: torch.Tensor) -> None:
        bits = torch.where(largest < _SMALLEST, 0.0, largest / _FLOAT8_TOP).view(torch.int32)
        exponent = (bits + (1 << _EXPONENT_BITS) - 1) >> _EXPONENT_BITS
        message[: largest.numel()] = torch.where(largest.isfinite(), exponent, _NO_EXPONENT).to(torch.uint8)

    def elements(self, shard: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        exponent = scales[: shard.numel() // self.block].to(torch.int32)
        # Elements of a block whose scale is no number become NaN themselves.
        scale = torch.where(exponent == _NO_EXPONENT, torch.nan, (exponent << _EXPONENT_BITS).view(torch.float32))
        return self.blocks(shard, scale).to(torch.float8_e4m3fn).view(torch.uint8).view(-1)

    def decoded(self, b: Builder[T], elements: T, scales: T, size: int) -> T:
        numbers = cast(b, b.call(aten.view.dtype, elements, torch.float8_e4m3fn), torch.float32)
        exponent = cast(b, self._of_ranks(b, scales, size, b.value(elements).numel()), torch.int32)
        shifted = b.call(aten.bitwise_left_shift.Tensor_Scalar, exponent, _EXPONENT_BITS)
        return self._times(b, numbers, b.call(aten.view.dtype, shifted, torch.float32), size)


_FLOAT4_TOP = 6.0
_SIGN = 8


@dataclasses.dataclass(frozen=True)
class _FourBits(WireFormat):
    """NVIDIA's NVFP4: numbers of 4 bits (E2M1: 0, 1/2, 1, 3/2, 2, 3, 4, 6), with scales of scales.

    A block's scale is a float8_e4m3fn, times one float32 for the whole shard, `M / (448 * 6)`. Of two elements the
    first has the low bits of their byte.
    """

    def _write_scales(self, largest: torch.Tensor, message: torch.Tensor) -> None:
        of_shard = largest.max() / (_FLOAT8_TOP * _FLOAT4_TOP)
        of_shard = torch.where(of_shard < _SMALLEST, 0.0, of_shard)
        message[-self.shard_bytes :].view(torch.float32).copy_(of_shard)
        small = largest / _FLOAT4_TOP / of_shard
        of_blocks = torch.where((of_shard == 0) | (largest < _SMALLEST), 0.0, small).clamp(max=_FLOAT8_TOP)
        message[: largest.numel()] = of_blocks.to(torch.float8_e4m3fn).view(torch.uint8)

    def elements(self, shard: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        small = scales[: shard.numel() // self.block].view(torch.float8_e4m3fn).float()
        scaled = self.blocks(shard, small * scales[-self.shard_bytes :].view(torch.float32)).nan_to_num(0.0)
        size = scaled.abs().clamp(max=_FLOAT4_TOP)
        # Numbers are 1/2 apart up to 2, then 1 up to 4, then 2; `round` takes the even one of two that are as near.
        above = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
        code = torch.where(size < 2, (size * 2).round(), above)
        code = (code.to(torch.uint8) + _SIGN * (scaled < 0)).view(-1, self.per_byte)
        return (code[:, 0] + (code[:, 1] << 4)).to(torch.uint8)

    def decoded(self, b: Builder[T], elements: T, scales: T, size: int) -> T:
        numel = b.value(elements).numel() * self.per_byte
        of_blocks = b.call(aten.view.dtype, self._of_ranks(b, scales, size, numel), torch.float8_e4m3fn)
        floats = view(b, b.call(aten.view.dtype, scales, torch.float32), [size, -1])
        last = b.value(floats).shape[1]
        scale = b.call(aten.mul.Tensor, cast(b, of_blocks, torch.float32), narrow(b, floats, 1, last - 1, last))
        return self._times(b, self._numbers(b, elements), scale, size)

    def _numbers(self, b: Builder[T], elements: T) -> T:
        """The numbers of 4 bits in float32, `[bytes, 2]`."""
        both = cast(b, b.call(aten.unsqueeze.default, elements, 1), torch.int32)
        iota, device = torch.ops.prims.iota.default, b.value(elements).device
        shifts = b.call(iota, self.per_byte, start=0, step=4, dtype=torch.int32, device=device, requires_grad=False)
        code = b.call(aten.bitwise_and.Scalar, b.call(aten.bitwise_right_shift.Tensor, both, shifts), 2 * _SIGN - 1)
        size_code = cast(b, b.call(aten.bitwise_and.Scalar, code, _SIGN - 1), torch.float32)
        # Codes 0 to 4 are halves, 5 and 6 are 3 and 4, and 7 is 6.
        is_last = cast(b, b.call(aten.eq.Scalar, size_code, _SIGN - 1), torch.float32)
        above = b.call(aten.add.Tensor, b.call(aten.sub.Tensor, size_code, 2.0), is_last)
        halves = b.call(aten.mul.Tensor, size_code, 0.5)
        number = b.call(aten.where.self, b.call(aten.le.Scalar, size_code, 4.0), halves, above)
        return b.call(aten.where.self, b.call(aten.ge.Scalar, code, _SIGN), b.call(aten.neg.default, number), number)


FORMATS: dict[str, WireFormat] = {
    wire.name: wire
    for wire in (
        _Float32Scales("int8", block=128, scale_bytes=4, dtype=torch.int8, top=127.0),
        _Float32Scales("float8_e4m3fn", block=128, scale_bytes=4, dtype=torch.float8_e4m3fn, top=_FLOAT8_TOP),
        _PowerOfTwoScales("mxfp8", block=32, scale_bytes=1),
        _FourBits("nvfp4", block=16, scale_bytes=1, per_byte=2, shard_bytes=4),
    )
}
"""All of them, by name."""
ASKED: dict[torch.dtype | str, WireFormat] = {getattr(torch, name, name): wire for name, wire in FORMATS.items()}
"""By what users ask for: a dtype of torch, or the name of what is none."""


def gathered_bytes(spec: UnshardSpec) -> float:
    """Bytes of one element in the messages of an all-gather."""
    return FORMATS[spec.gather_format].element_bytes if spec.gather_format else spec.param_dtype.itemsize
