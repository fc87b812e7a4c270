"""Hardware that plans are made for: links, devices, and clusters of them; every number with its unit and its source."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import fx

from fsdp_compile.config.choices import check_name, check_rate
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import Role, StepGraph, require
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.layout.hosts import ranks_per_host as launched_per_host


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A number with its source.

    Attributes:
        source: Where the number comes from; "assumed" if it was not measured.
    """

    value: float
    unit: str
    source: str


@dataclasses.dataclass(frozen=True)
class MeasuredCollective:
    """Measured times of one kind of collective in groups of one size.

    Attributes:
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        points: Bytes that each rank sent and the time in us, at least two, growing. Times between are interpolated;
            beyond the last one, the last two give the time of a byte; below the first one, its time is taken.
        on_one_host: How many of the ranks share a host; `None` for any number.
    """

    kind: str
    ranks: int
    points: tuple[tuple[float, float], ...]
    on_one_host: int | None = None

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


class Port(enum.Enum):
    """What the rate of a link belongs to."""

    GROUP = "group"
    """Each rank of any group has it, as inside a host, or where the bandwidth of a group's ring is given."""
    RANK = "rank"
    """Each rank has a port of its own. A ring over hosts uses those of all its ranks on a host at once."""
    HOST = "host"
    """A host has one port, which the groups that its ranks are in share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The connection of a group's ranks; or of a device with its host.

    Attributes:
        rate: One direction of one port, byte/s.
        rate_share: Share of it that a large message reaches.
        launch: Time of a message without data, us.
        hop: Added for every doubling of the number of ranks, us.
        message: Added for every message of a grouped call but the first, us.
        port: What has a port.
        measured: Collectives whose times are known better than by the formula.
    """

    name: str
    rate: Quantity
    rate_share: Quantity
    launch: Quantity
    hop: Quantity
    message: Quantity = Quantity(0.0, "us", "assumed; a grouped call is started once, whatever it holds")
    port: Port = Port.GROUP
    measured: tuple[MeasuredCollective, ...] = dataclasses.field(default=(), repr=False)

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of a large message through one port."""
        return self.rate.value * self.rate_share.value

    def ring_bytes_per_s(self, on_one_host: int, ranks_per_host: int) -> float:
        """Bytes per second that a rank sends in a ring with so many of a host's ranks, others being in rings alike."""
        match self.port:
            case Port.GROUP:
                return self.bytes_per_s
            case Port.RANK:
                return self.bytes_per_s * on_one_host
            case Port.HOST:
                return self.bytes_per_s * min(1.0, on_one_host / ranks_per_host)

    def table(self, kind: str, ranks: int, on_one_host: int) -> MeasuredCollective | None:
        """Measured times of a kind of collective in a group, if there are any."""
        for table in self.measured:
            if (table.kind, table.ranks) == (kind, ranks) and table.on_one_host in (None, on_one_host):
                return table
        return None

    def formula_us(self, sent_bytes: float, ranks: int, bytes_per_s: float) -> float:
        """Time of a collective by the formula: latency, then what each rank sends at so many bytes per second."""
        return self.launch.value + self.hop.value * math.log2(ranks) + sent_bytes * 1e6 / bytes_per_s

    def copy_us(self, size_bytes: float) -> float:
        """Time of a copy between host and device."""
        return self.launch.value + size_bytes * 1e6 / self.bytes_per_s


def share_of_others(ranks: int) -> float:
    """Share of a sharded whole that is on the other ranks: `(N-1)/N`."""
    return (ranks - 1) / ranks


_LINK_SHARE: Final = "assumed; nccl-tests bus bandwidth of large messages is reported between 0.8 and 0.95"
_NETWORK_SHARE: Final = "323 GB/s all-gather bus bandwidth reported on 4 hosts of 8 H100 with 8 ports of 400 Gb/s each"
_LATENCY: Final = "assumed; order of magnitude of nccl-tests at small sizes, growing with log2 of the ranks"


def make_link(name: str, gb_per_s: float, source: str, port: Port = Port.GROUP) -> Link:
    """A link of `gb_per_s` (1e9 byte/s, one direction of one port), with assumed efficiency and latency."""
    share = Quantity(0.9, "share of rate", _LINK_SHARE)
    if port is Port.RANK:
        share = Quantity(323 / 400, "share of rate", _NETWORK_SHARE)
    return Link(
        name=name,
        rate=Quantity(gb_per_s * 1e9, "byte/s", source),
        rate_share=share,
        launch=Quantity(10.0, "us", _LATENCY),
        hop=Quantity(5.0, "us", _LATENCY),
        port=port,
    )


LINKS: Final = {
    link.name: link
    for link in (
        make_link("ib-400", 50.0, "InfiniBand NDR, one 400 Gb/s port per device", Port.RANK),
        make_link("ib-200", 25.0, "InfiniBand HDR, one 200 Gb/s port per device", Port.RANK),
        make_link("nvlink5", 900.0, "NVIDIA HGX B200 data sheet: 1.8 TB/s NVLink per GPU, both directions"),
        make_link("nvlink4", 450.0, "NVIDIA H100 data sheet: 900 GB/s NVLink, both directions"),
        make_link("nvlink3", 300.0, "NVIDIA A100 data sheet: 600 GB/s NVLink, both directions"),
        make_link("pcie-5", 64.0, "NVIDIA H100 data sheet: PCIe Gen5 128 GB/s, both directions"),
        make_link("ethernet-10", 1.25, "10 Gb/s Ethernet, one port per host", Port.HOST),
        make_link("ethernet-1", 0.125, "1 Gb/s Ethernet, one port per host", Port.HOST),
    )
}
"""Links by name."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What measured times are valid for.

    Attributes:
        device_type: "cuda" or "cpu".
        device: Name of the device.
        torch: Its version.
        file: Path of the file with the times, as it was given; empty before they are in one.
        digest: Of what is in the file.
    """

    device_type: str
    device: str
    ranks: int
    ranks_per_host: int
    torch: str
    file: str = dataclasses.field(default="", compare=False)
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.ranks_per_host} per host, {self.device}, torch {self.torch}"

    @property
    def data_sheet(self) -> Device:
        """The device with its maker's numbers."""
        return device_reported_as(self.device) if self.device_type == "cuda" else DEVICES["cpu"]


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device per rank, and the links between ranks.

    A group whose ranks share a host sends on `device.near`, every other one on `link`; all of them send on `link` where
    that is given as what each rank of any group has (`Port.GROUP`).

    Attributes:
        link: The network between hosts, or one link for all groups.
        ranks_per_host: Consecutive ranks that share a host; `None` for what the launcher says (`LOCAL_WORLD_SIZE`), or
            else for as many as a host usually has of the device.
        cluster: Where it was measured; `None` if it was not.
    """

    device: Device
    link: Link
    ranks_per_host: int | None = None
    cluster: Cluster | None = None

    @property
    def local_size(self) -> int:
        """Ranks of a host."""
        return self.ranks_per_host or launched_per_host() or int(self.device.per_host.value)

    def link_of(self, group: GroupRanks) -> Link:
        """The link that the collectives of a group are sent on."""
        is_near = self.link.port is not Port.GROUP and group.on_one_host(self.local_size) == group.size
        return self.device.near if is_near else self.link

    def bytes_per_s(self, group: GroupRanks) -> float:
        """Bytes per second that each rank of a group sends in a large collective."""
        link, on_one_host = self.link_of(group), group.on_one_host(self.local_size)
        rate = link.ring_bytes_per_s(on_one_host, self.local_size)
        if link.port is Port.GROUP or on_one_host == 1:
            return rate
        # A ring over hosts also passes between the ranks on each of them.
        return min(rate, self.device.near.bytes_per_s)

    def collective_us(self, kind: str, sent_bytes: float, group: GroupRanks) -> float:
        """Time of a collective of `kind` ("all-gather") alone on its link: measured, or by the formula."""
        link = self.link_of(group)
        table = link.table(kind, group.size, group.on_one_host(self.local_size))
        if table is not None:
            return table.time_us(sent_bytes)
        return link.formula_us(sent_bytes, group.size, self.bytes_per_s(group))

    @property
    def data_sheet(self) -> Device:
        """The device with its maker's numbers, also where others were measured."""
        return self.device if self.cluster is None else self.cluster.data_sheet

    @property
    def measured_links(self) -> list[str]:
        """Names of the links with measured times."""
        return [link.name for link in (self.device.near, self.link) if link.measured]

    @property
    def links(self) -> str:
        """Names of the links."""
        if self.link.port is Port.GROUP:
            return self.link.name
        return f"{self.device.near.name} in hosts of {self.local_size}, {self.link.name}"


def hardware(device: str = "h100-sxm", link: str | float = "ib-400", *, ranks_per_host: int | None = None) -> Hardware:
    """Looks hardware up by name.

    Args:
        device: One of `DEVICES`.
        link: One of `LINKS`, the network between hosts; or a number of GB/s (1e9 byte/s) that each rank of any group
            sends in one direction, whatever hosts the group is on.
        ranks_per_host: See `Hardware`.

    Raises:
        ConfigError: For an unknown name, or a number that is not positive.
    """
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ConfigError(
            f"a host cannot have {ranks_per_host} ranks", where="hardware(ranks_per_host=...)", instead="1, 2, ..."
        )
    if isinstance(link, int | float):
        check_rate(link)
        given = make_link(f"{link:g} GB/s", link, "given by the user")
    else:
        given = _find(link, LINKS, "link")
    return Hardware(_find(device, DEVICES, "device"), given, ranks_per_host)


def _find(name: str, known: Mapping[str, Any], what: str) -> Any:
    check_name(name, known, what)
    return known[name]


def hardware_of(step: StepGraph) -> Hardware:
    """Device and links that the graph of a step will run on."""
    # All ranks must come to the same answer, or their schedules differ: only what they have in common may decide.
    flats = list(step.nodes(Role.FLAT))
    if not flats or (require(flats[0]).specs[0].compute or flats[0].meta["val"].device.type) != "cuda":
        return hardware("cpu", network_of(DEVICES["cpu"]))
    device = device_reported_as(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    return hardware(device.name, network_of(device))


def network_of(device: Device) -> str:
    """The link that hosts with a device usually have between them."""
    return {"cpu": "ethernet-10", "a100-sxm": "ib-200"}.get(device.name, "ib-400")
