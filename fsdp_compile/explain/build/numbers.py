"""The numbers that a plan was estimated with, each with where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fsdp_compile.cost.communicate import COPIES
from fsdp_compile.cost.hardware import Device, Hardware, Link, Port, Quantity
from fsdp_compile.explain.report import Collective, Number

_RATES: Final = {
    Port.GROUP: "rate of each rank",
    Port.RANK: "rate of the port that a rank has",
    Port.HOST: "rate of the port that a host has",
}


def numbers(hardware: Hardware, collectives: Sequence[Collective]) -> Iterator[Number]:
    """Those of the device, and of each link that some collective or copy is sent on."""
    yield from _of_device(hardware.device)
    links = (hardware.device.near, hardware.link, hardware.device.host)
    for link in {link.name: link for link in links}.values():
        sent = [c for c in collectives if c.link == link.name]
        if sent:
            yield from _of_link(link, sent)


def _of_device(device: Device) -> Iterator[Number]:
    names: dict[Quantity, list[str]] = {}
    for dtype in device.matmul:
        names.setdefault(device.matmul_peak(dtype), []).append(str(dtype).removeprefix("torch."))
    for peak, dtypes in names.items():
        yield _number(device.name, f"matmul of {', '.join(dtypes)}", peak)
    yield _number(device.name, "share of that", device.matmul_share)
    yield _number(device.name, "memory rate", device.memory_rate)
    yield _number(device.name, "share of that", device.memory_share)
    yield _number(device.name, "memory", device.memory)


def _of_link(link: Link, sent: Sequence[Collective]) -> Iterator[Number]:
    yield _number(link.name, _RATES[link.port], link.rate)
    yield _number(link.name, "share of that", link.rate_share)
    rings = dict.fromkeys((c.ranks, c.bytes_per_s) for c in sent if c.kind not in COPIES)
    for ranks, bytes_per_s in rings if link.port is not Port.GROUP else ():
        ports = f"{bytes_per_s / link.bytes_per_s:.3g} such ports at once"
        yield Number(link.name, f"ring of {ranks} ranks", bytes_per_s, "byte/s", ports)
    yield _number(link.name, "launch", link.launch)
    yield _number(link.name, "per doubling of ranks", link.hop)
    for table in link.measured:
        if table.ranks in {ranks for ranks, _ in rings}:
            what = f"{table.kind} over {table.ranks} ranks"
            yield Number(link.name, what, len(table.points), "sizes", link.rate.source)


def _number(of: str, what: str, quantity: Quantity) -> Number:
    return Number(of, what, quantity.value, quantity.unit, quantity.source)
