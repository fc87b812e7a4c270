"""Accelerators that plans are made for: every number with its unit and its source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from fsdp_compile.cost.links import LINKS, Link, Quantity, make_link

Estimate = Callable[[fx.Node], float | None]
"""How long a node takes in us, if it is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        matmul: Dense peak per dtype, FLOP/s; dtypes that are absent take the slowest of these.
        tf32: Dense peak of float32 matmuls where torch may round their inputs to TF32
            (`torch.set_float32_matmul_precision`); `None` for a device without.
        matmul_share: Share of the peak that a large matmul reaches.
        memory_rate: Peak of device memory, byte/s.
        memory_share: Share of the peak that a large copy reaches.
        memory: Device memory, byte.
        host: The bus between device and host, both directions at once.
        near: The link to the devices of the same host.
        per_host: Devices of a host, for plans that no launcher says it for.
        estimate: Says how long a node takes in us, or `None`; asked first. It must depend on the node alone, so that it
            is the same on every rank.
        measured: Times in us by `cost.compute.signature_of`; taken where `estimate` has none.
    """

    name: str
    matmul: Mapping[torch.dtype, Quantity]
    tf32: Quantity | None = None
    matmul_share: Quantity
    memory_rate: Quantity
    memory_share: Quantity
    memory: Quantity
    host: Link
    near: Link
    per_host: Quantity
    estimate: Estimate | None = dataclasses.field(default=None, repr=False)
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict, repr=False)

    def matmul_peak(self, dtype: torch.dtype | None) -> Quantity:
        """The peak of matmuls of `dtype`, as torch is set now."""
        if dtype is torch.float32 and self.tf32 is not None and torch.backends.cuda.matmul.fp32_precision == "tf32":
            return self.tf32
        slowest = min(self.matmul.values(), key=lambda q: q.value)
        return self.matmul.get(dtype, slowest)  # type: ignore[arg-type]

    def flops_per_s(self, dtype: torch.dtype | None) -> Any:
        """FLOP/s that a large matmul of `dtype` reaches."""
        return self.matmul_peak(dtype).value * self.matmul_share.value

    @property
    def bytes_per_s(self) -> Any:
        """Bytes per second that a large copy reads and writes together."""
        return self.memory_rate.value * self.memory_share.value


_SHARE: Final = "assumed; large bf16 matmuls on this class of device are reported between 0.6 and 0.8"
_COPY_SHARE: Final = "assumed; stream-like kernels are reported between 0.85 and 0.95"
_BUS_SHARE: Final = "assumed; copies of large pinned buffers are reported between 0.8 and 0.9"
_COPY_LATENCY: Final = "assumed; order of magnitude of one asynchronous copy"
_CORES: Final = "assumed; a few cores of a server"


def _bus(name: str, gb_per_s: float, source: str) -> Link:
    return Link(
        name=name,
        rate=Quantity(gb_per_s * 1e9, "byte/s", source),
        rate_share=Quantity(0.85, "share of rate", _BUS_SHARE),
        launch=Quantity(10.0, "us", _COPY_LATENCY),
        hop=Quantity(0.0, "us", "two ends, no ranks"),
    )


@dataclasses.dataclass(frozen=True)
class _Board:
    """What devices have in common that differ in their memory: dense peaks in TFLOP/s, links, and number in a host."""

    half: float
    single: float
    double: float
    host: Link
    near: Link
    tf32: float | None = None
    fp8: float | None = None
    per_host: int = 8
    per_host_source: str = "assumed; HGX and DGX hosts have 8"


_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


def _device(name: str, sheet: str, board: _Board, *, tb_per_s: float, gb: float) -> Device:
    tflops = {torch.bfloat16: board.half, torch.float16: board.half}
    tflops |= {torch.float32: board.single, torch.float64: board.double}
    tflops |= dict.fromkeys(_FP8, board.fp8) if board.fp8 is not None else {}
    return Device(
        name=name,
        matmul={dtype: Quantity(value * 1e12, "FLOP/s", sheet) for dtype, value in tflops.items()},
        tf32=None if board.tf32 is None else Quantity(board.tf32 * 1e12, "FLOP/s", f"{sheet}, TF32"),
        matmul_share=Quantity(0.7, "share of peak", _SHARE),
        memory_rate=Quantity(tb_per_s * 1e12, "byte/s", sheet),
        memory_share=Quantity(0.9, "share of peak", _COPY_SHARE),
        memory=Quantity(gb * 1e9, "byte", sheet),
        host=board.host,
        near=board.near,
        per_host=Quantity(board.per_host, "devices", board.per_host_source),
    )


_PCIE_5: Final = _bus("PCIe 5.0 x16", 64.0, "NVIDIA H100 data sheet: PCIe Gen5 128 GB/s, both directions")
_PCIE_4: Final = _bus("PCIe 4.0 x16", 32.0, "NVIDIA A100 data sheet: PCIe Gen4 64 GB/s, both directions")
_C2C: Final = _bus("NVLink-C2C", 450.0, "NVIDIA GH200 data sheet: NVLink-C2C 900 GB/s, both directions")
_MEMORY: Final = _bus("memory", 10.0, _CORES)
_SAME_HOST: Final = make_link("the same host", 1.25, "assumed; as 10 Gb/s Ethernet")
_GRACE: Final = "assumed; hosts of 4 are common (Alps, JUPITER)"

_B200: Final = _Board(2250.0, 80.0, 40.0, _PCIE_5, LINKS["nvlink5"], tf32=1100.0, fp8=4500.0)
_SXM_5: Final = _Board(989.4, 66.9, 66.9, _PCIE_5, LINKS["nvlink4"], tf32=494.7, fp8=1978.9)
_GH200: Final = _Board(990.0, 67.0, 67.0, _C2C, LINKS["nvlink4"], 494.0, 1979.0, per_host=4, per_host_source=_GRACE)
# NVLink bridges connect pairs of these cards alone, so a ring over more of them is as fast as the bus.
_NVL: Final = _Board(835.5, 60.0, 60.0, _PCIE_5, LINKS["pcie-5"], tf32=417.5, fp8=1670.5)
_CARD: Final = _Board(756.5, 51.0, 51.0, _PCIE_5, LINKS["pcie-5"], tf32=378.0, fp8=1513.0)
_SXM_4: Final = _Board(312.0, 19.5, 19.5, _PCIE_4, LINKS["nvlink3"], tf32=156.0)
_CPU: Final = _Board(0.1, 0.1, 0.05, _MEMORY, _SAME_HOST, per_host_source="assumed")

DEVICES: Final = {
    device.name: device
    for device in (
        _device("b200", "NVIDIA HGX B200 data sheet, 1000 W, dense", _B200, tb_per_s=8.0, gb=180),
        _device("h200-sxm", "NVIDIA H200 data sheet, SXM, dense", _SXM_5, tb_per_s=4.8, gb=141),
        _device("h100-sxm", "NVIDIA H100 data sheet, SXM5, dense", _SXM_5, tb_per_s=3.35, gb=80),
        _device("h100-nvl", "NVIDIA H100 data sheet, NVL, dense", _NVL, tb_per_s=3.9, gb=94),
        _device("h100-pcie", "NVIDIA H100 data sheet, PCIe, dense", _CARD, tb_per_s=2.0, gb=80),
        _device("gh200", "NVIDIA GH200 data sheet, HBM3, dense", _GH200, tb_per_s=4.0, gb=96),
        _device("a100-sxm", "NVIDIA A100 80GB data sheet, SXM4, dense", _SXM_4, tb_per_s=2.039, gb=80),
        _device("cpu", _CORES, _CPU, tb_per_s=0.02, gb=16),
    )
}
"""Devices by name."""

_REPORTED: Final = {
    "GH200": "gh200",
    "B200": "b200",
    "H200": "h200-sxm",
    "H100 NVL": "h100-nvl",
    "H100 PCIe": "h100-pcie",
    "H100": "h100-sxm",
    "A100": "a100-sxm",
}
"""Parts of the names that CUDA reports; the first that fits counts."""


def device_reported_as(name: str) -> Device:
    """The device that CUDA calls `name` ("NVIDIA H100 PCIe"); one that is not known counts as an H100."""
    return DEVICES[next((key for part, key in _REPORTED.items() if part in name), "h100-sxm")]
