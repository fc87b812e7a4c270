"""Hardware that plans are made for: one device per rank, and the links over which the ranks of a group send."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_compile.config.choices import check_name, check_rate
from fsdp_compile.cost.devices import DEVICES, Device, device_reported_as
from fsdp_compile.cost.links import LINKS, Link, MeasuredCollective, Port, Quantity, make_link
from fsdp_compile.errors import ConfigError
from fsdp_compile.ir.graph import Role, StepGraph, require
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.layout.hosts import ranks_per_host as launched_per_host

__all__ = [
    "DEVICES",
    "LINKS",
    "Cluster",
    "Device",
    "Hardware",
    "Link",
    "MeasuredCollective",
    "Port",
    "Quantity",
    "hardware",
    "hardware_of",
    "make_link",
    "network_of",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What measured times are valid for.

    Attributes:
        device_type: "cuda" or "cpu".
        device: Name of the device.
        torch: Its version.
        file: Name of the file with the times; empty before they are in one.
        digest: Of what is in the file.
    """

    device_type: str
    device: str
    ranks: int
    ranks_per_host: int
    torch: str
    file: str = ""
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.ranks_per_host} per host, {self.device}, torch {self.torch}"


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
