"""Devices and links that plans are made for: every number with its unit and its source."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from fsdp_compile.config.choices import check_name, check_rate
from fsdp_compile.cost.formulas import collective_us
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import Role, StepGraph, require

Estimate = Callable[[fx.Node], float | None]
"""How long a node takes in us, if it is known."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number with its source.

    Attributes:
        value: A number, or a sympy expression where a formula is to stay open.
        source: Where the number comes from; "assumed" if it was not measured.
    """

    value: Any
    unit: str
    source: str


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """Measured times of one kind of collective in a group of one size.

    Attributes:
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        points: Bytes that each rank sent and the time in us, at least two, growing. Times between are interpolated;
            beyond the last one, the last two give the time of a byte; below the first one, its time is taken.
    """

    kind: str
    ranks: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if len(sizes) < 2 or sizes != sorted(set(sizes)):
            raise ConfigError(
                f"times of {self.kind} over {self.ranks} ranks need two or more sizes, growing",
                where=f"MeasuredCollective(points={self.points})",
                instead="((1e3, 30.0), (1e6, 110.0), (1e9, 90e3))",
            )

    def time_us(self, sent_bytes: float) -> float:
        """Time of a collective in which each rank sends so many bytes."""
        sizes = [size for size, _ in self.points]
        at = min(max(bisect.bisect_left(sizes, sent_bytes), 1), len(sizes) - 1)
        (size, time_us), (next_size, next_us) = self.points[at - 1], self.points[at]
        # Without an upper bound: beyond the last point this extrapolates.
        share = max(0.0, (sent_bytes - size) / (next_size - size))
        return time_us + share * (next_us - time_us)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The connection of a group's ranks, as one rank sees it; or of a device with its host.

    Attributes:
        rate: One direction of one rank, byte/s.
        rate_share: Share of it that a large message reaches.
        launch: Time of a message without data, us.
        hop: Added for every doubling of the number of ranks, us.
        message: Added for every message of a grouped call but the first, us.
        measured: Collectives whose times are known better than by the formula.
    """

    name: str
    rate: Quantity
    rate_share: Quantity
    launch: Quantity
    hop: Quantity
    message: Quantity = Quantity(0.0, "us", "assumed; a grouped call is started once, whatever it holds")
    measured: tuple[MeasuredCollective, ...] = dataclasses.field(default=(), repr=False)

    @property
    def bytes_per_s(self) -> Any:
        """Bytes per second of a large message."""
        return self.rate.value * self.rate_share.value

    def collective_us(self, kind: str, sent_bytes: Any, ranks: Any) -> Any:
        """Time of a collective of `kind` ("all-gather") alone on the link: measured, or by the formula."""
        for table in self.measured:
            if (table.kind, table.ranks) == (kind, ranks):
                return table.time_us(sent_bytes)
        return collective_us(
            sent_bytes, ranks, launch_us=self.launch.value, hop_us=self.hop.value, bytes_per_s=self.bytes_per_s
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        matmul: Dense peak per dtype, FLOP/s; dtypes that are absent take the slowest of these.
        matmul_share: Share of the peak that a large matmul reaches.
        memory_rate: Peak of device memory, byte/s.
        memory_share: Share of the peak that a large copy reaches.
        memory: Device memory, byte.
        host: The bus between device and host, both directions at once.
        near: The link to the devices of the same machine.
        estimate: Says how long a node takes in us, or `None`; asked first. It must depend on the node alone, so that it
            is the same on every rank.
        measured: Times in us by `cost.compute.signature_of`; taken where `estimate` has none.
    """

    name: str
    matmul: Mapping[torch.dtype, Quantity]
    matmul_share: Quantity
    memory_rate: Quantity
    memory_share: Quantity
    memory: Quantity
    host: Link
    near: Link
    estimate: Estimate | None = dataclasses.field(default=None, repr=False)
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict, repr=False)

    def flops_per_s(self, dtype: torch.dtype | None) -> Any:
        """FLOP/s that a large matmul of `dtype` reaches."""
        slowest = min(self.matmul.values(), key=lambda q: q.value)
        return self.matmul.get(dtype, slowest).value * self.matmul_share.value  # type: ignore[arg-type]

    @property
    def bytes_per_s(self) -> Any:
        """Bytes per second that a large copy reads and writes together."""
        return self.memory_rate.value * self.memory_share.value


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device per rank, and the link between them."""

    device: Device
    link: Link


_SHARE: Final = "assumed; large bf16 matmuls on this class of device are reported between 0.6 and 0.8"
_COPY_SHARE: Final = "assumed; stream-like kernels are reported between 0.85 and 0.95"
_LINK_SHARE: Final = "assumed; nccl-tests bus bandwidth of large messages is reported between 0.8 and 0.95"
_LATENCY: Final = "assumed; order of magnitude of nccl-tests at small sizes, growing with log2 of the ranks"
_BUS_SHARE: Final = "assumed; copies of large pinned buffers are reported between 0.8 and 0.9"
_COPY_LATENCY: Final = "assumed; order of magnitude of one asynchronous copy"


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
    """What devices have in common that differ in their memory: dense peaks in TFLOP/s, and their links."""

    tflops: Mapping[torch.dtype, float]
    host: Link
    near: Link


def _device(name: str, sheet: str, board: _Board, *, tb_per_s: float, gb: float) -> Device:
    return Device(
        name=name,
        matmul={dtype: Quantity(value * 1e12, "FLOP/s", sheet) for dtype, value in board.tflops.items()},
        matmul_share=Quantity(0.7, "share of peak", _SHARE),
        memory_rate=Quantity(tb_per_s * 1e12, "byte/s", sheet),
        memory_share=Quantity(0.9, "share of peak", _COPY_SHARE),
        memory=Quantity(gb * 1e9, "byte", sheet),
        host=board.host,
        near=board.near,
    )


def make_link(name: str, gb_per_s: Any, source: str) -> Link:
    """A link of `gb_per_s` (1e9 byte/s, one direction of one rank), with assumed efficiency and latency."""
    return Link(
        name=name,
        rate=Quantity(gb_per_s * 1e9, "byte/s", source),
        rate_share=Quantity(0.9, "share of rate", _LINK_SHARE),
        launch=Quantity(10.0, "us", _LATENCY),
        hop=Quantity(5.0, "us", _LATENCY),
    )


_CORES: Final = "assumed; a few cores of a server"
_CPU: Final = {torch.float32: 0.1, torch.float64: 0.05, torch.bfloat16: 0.1}
_HOPPER: Final = {torch.bfloat16: 989.4, torch.float16: 989.4, torch.float32: 66.9, torch.float64: 66.9}
_AMPERE: Final = {torch.bfloat16: 312.0, torch.float16: 312.0, torch.float32: 19.5, torch.float64: 19.5}
_PCIE_5: Final = _bus("PCIe 5.0 x16", 64.0, "NVIDIA H100 data sheet: PCIe Gen5 128 GB/s, both directions")
_PCIE_4: Final = _bus("PCIe 4.0 x16", 32.0, "NVIDIA A100 data sheet: PCIe Gen4 64 GB/s, both directions")
_MEMORY: Final = _bus("memory", 10.0, _CORES)
LINKS: Final = {
    link.name: link
    for link in (
        make_link("ib-400", 50.0, "InfiniBand NDR, one 400 Gb/s port per device"),
        make_link("ib-200", 25.0, "InfiniBand HDR, one 200 Gb/s port per device"),
        make_link("nvlink4", 450.0, "NVIDIA H100 data sheet: 900 GB/s NVLink, both directions"),
        make_link("nvlink3", 300.0, "NVIDIA A100 data sheet: 600 GB/s NVLink, both directions"),
        make_link("ethernet-10", 1.25, "10 Gb/s Ethernet"),
        make_link("ethernet-1", 0.125, "1 Gb/s Ethernet"),
    )
}
_SXM_5: Final = _Board(_HOPPER, _PCIE_5, LINKS["nvlink4"])
_SXM_4: Final = _Board(_AMPERE, _PCIE_4, LINKS["nvlink3"])
DEVICES: Final = {
    device.name: device
    for device in (
        _device("h100-sxm", "NVIDIA H100 data sheet, SXM5, dense", _SXM_5, tb_per_s=3.35, gb=80),
        _device("h200-sxm", "NVIDIA H200 data sheet, SXM, dense", _SXM_5, tb_per_s=4.8, gb=141),
        _device("a100-sxm", "NVIDIA A100 80GB data sheet, SXM4, dense", _SXM_4, tb_per_s=2.039, gb=80),
        _device("cpu", _CORES, _Board(_CPU, _MEMORY, LINKS["ethernet-10"]), tb_per_s=0.02, gb=16),
    )
}


def hardware(device: str = "h100-sxm", link: str | float = "ib-400") -> Hardware:
    """Looks hardware up by name.

    Args:
        device: One of `DEVICES`.
        link: One of `LINKS`, or a number of GB/s (1e9 byte/s) for one direction of one rank.

    Raises:
        ConfigError: For an unknown name, or a rate that is not positive.
    """
    if isinstance(link, int | float):
        check_rate(link)
        return Hardware(_find(device, DEVICES, "device"), make_link(f"{link:g} GB/s", link, "given by the user"))
    return Hardware(_find(device, DEVICES, "device"), _find(link, LINKS, "link"))


def _find(name: str, known: Mapping[str, Any], what: str) -> Any:
    check_name(name, known, what)
    return known[name]


def hardware_of(step: StepGraph) -> Hardware:
    """Device and link that the graph of a step will run on."""
    # All ranks must come to the same answer, or their schedules differ: only what they have in common may decide.
    flats = list(step.nodes(Role.FLAT))
    if not flats or (require(flats[0]).specs[0].compute or flats[0].meta["val"].device.type) != "cuda":
        return hardware("cpu", "ethernet-10")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = next((key for key in DEVICES if key.split("-")[0].upper() in name.upper()), "h100-sxm")
    together = require(flats[0]).specs[0].size <= torch.cuda.device_count()
    link = "nvlink3" if known.startswith("a100") else "nvlink4"
    return hardware(known, link if together else "ib-400")
