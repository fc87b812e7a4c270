"""What one device reaches: matmuls by dtype, copies in its memory, copies from the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from fsdp_compile.calibrate.collectives import ROUNDS, Agree
from fsdp_compile.cost.calibrated import TF32
from fsdp_compile.cost.devices import DEVICES, device_reported_as
from fsdp_compile.explain.measure import median_us

_LARGEST: Final = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the largest factors."""
_LONG_US: Final = 20_000.0
"""Matmuls that take so long are large enough."""
_COPIED_BYTES: Final = {"cpu": 64 * 10**6, "cuda": 256 * 10**6}


def matmul_rates(device: torch.device, agree: Agree) -> dict[str, float]:
    """FLOP/s of large square matmuls by dtype, of the slowest rank; "tf32" for float32 with inputs rounded to it."""
    found = {"bfloat16": _matmul_rate(torch.bfloat16, device, agree)}
    with _float32_matmuls("ieee"):
        found["float32"] = _matmul_rate(torch.float32, device, agree)
    if device.type == "cuda" and device_reported_as(torch.cuda.get_device_name(device)).tf32 is not None:
        with _float32_matmuls(TF32):
            found[TF32] = _matmul_rate(torch.float32, device, agree)
    return found


@contextmanager
def _float32_matmuls(precision: str) -> Iterator[None]:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def _matmul_rate(dtype: torch.dtype, device: torch.device, agree: Agree) -> float:
    size, time_us = 128, 0.0
    while time_us < _LONG_US and size < _LARGEST[device.type]:
        size *= 2
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        time_us = agree(median_us(lambda: a @ b, device, ROUNDS))  # noqa: B023
    return 2 * size**3 * 1e6 / time_us


def copy_rate(device: torch.device, agree: Agree) -> float:
    """Bytes per second that a large copy reads and writes together, on the slowest rank."""
    source = torch.zeros(_COPIED_BYTES[device.type] // 4, device=device)
    target = torch.zeros_like(source)
    time_us = agree(median_us(lambda: target.copy_(source), device, ROUNDS))
    return 2 * 4 * source.numel() * 1e6 / time_us


def host_copy_rate(device: torch.device, agree: Agree) -> float | None:
    """Bytes per second from pinned host memory, on the slowest rank; `None` for the host itself."""
    if device.type == "cpu":
        return None
    source = torch.zeros(_COPIED_BYTES[device.type] // 4, pin_memory=True)
    target = torch.zeros_like(source, device=device)
    time_us = agree(median_us(lambda: target.copy_(source, non_blocking=True), device, ROUNDS))
    return 4 * source.numel() * 1e6 / time_us


def memory_bytes(device: torch.device) -> float:
    """Memory of the device; of the host, what plans assume of one rank."""
    if device.type == "cpu":
        return float(DEVICES["cpu"].memory.value)
    return float(torch.cuda.get_device_properties(device).total_memory)
