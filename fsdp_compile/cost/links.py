"""Links between the ranks of a group, or between a device and its host: every number with its unit and its source."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math

from fsdp_compile.errors import ConfigError


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


_LINK_SHARE = "assumed; nccl-tests bus bandwidth of large messages is reported between 0.8 and 0.95"
_NETWORK_SHARE = "323 GB/s all-gather bus bandwidth reported on 4 hosts of 8 H100 with 8 ports of 400 Gb/s each"
_LATENCY = "assumed; order of magnitude of nccl-tests at small sizes, growing with log2 of the ranks"


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


LINKS = {
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
