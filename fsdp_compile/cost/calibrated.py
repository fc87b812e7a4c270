"""Hardware as `fsdp-compile calibrate` measured it on one cluster: its file, and what follows from it.

The file has what was measured; what plans take of it is decided here. Collectives of groups that were measured take
their measured times, all others the formula with the rate and the latency of the largest measured all-gather.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from fsdp_compile.cost.hardware import (
    DEVICES,
    Cluster,
    Device,
    Hardware,
    Link,
    MeasuredCollective,
    Quantity,
    hardware,
    network_of,
)
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.hosts import ranks_per_host

KINDS: Final = ("all-gather", "reduce-scatter", "all-reduce")
"""Collectives that are measured."""
TF32: Final = "tf32"
"""Key of float32 matmuls whose inputs are rounded to TF32, beside names of dtypes."""
_WHAT: Final = "fsdp-compile calibrate, 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, the same on all ranks.

    Attributes:
        matmul: FLOP/s of a large matmul by dtype ("bfloat16"), or "tf32".
        memory_bytes_per_s: What a large copy reads and writes together.
        host_bytes_per_s: Of a copy from pinned host memory; `None` for a device that has no memory of its own.
        memory_bytes: Of the device.
        collectives: Of groups of this cluster.
    """

    cluster: Cluster
    matmul: Mapping[str, float]
    memory_bytes_per_s: float
    host_bytes_per_s: float | None
    memory_bytes: float
    collectives: tuple[MeasuredCollective, ...]

    def to_text(self) -> str:
        """The text of the file."""
        return json.dumps({"what": _WHAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def of_text(cls, text: str) -> Calibration:
        """Reads the text back; raises `ValueError`, `TypeError` or `KeyError` for any other."""
        data = json.loads(text)
        if data.pop("what") != _WHAT:
            raise ValueError("it is not a file that this version writes")
        tables = tuple(map(_table, data.pop("collectives")))
        read = cls(cluster=Cluster(**data.pop("cluster")), collectives=tables, **data)
        numbers = [*read.matmul.values(), read.memory_bytes_per_s, read.memory_bytes, read.host_bytes_per_s or 1.0]
        numbers += [us for table in tables for _, us in table.points]
        if not all(isinstance(number, float | int) and 0 < number < math.inf for number in numbers):
            raise ValueError("a time or a rate is not positive")
        known = {TF32, *(str(dtype).removeprefix("torch.") for device in DEVICES.values() for dtype in device.matmul)}
        if not read.matmul or not known >= read.matmul.keys():
            raise ValueError(f"matmuls are of {', '.join(read.matmul) or 'no dtype'}")
        return read


def _table(data: Mapping[str, Any]) -> MeasuredCollective:
    table = MeasuredCollective(**{**data, "points": tuple((float(size), float(us)) for size, us in data["points"])})
    times = [us for _, us in table.points]
    if table.kind not in KINDS or times != sorted(times) or not 1 <= (table.on_one_host or 0) <= table.ranks:
        raise ValueError(f"times of {table.kind} over {table.ranks} ranks are not such as are measured")
    return table


def this_cluster(device_type: str, ranks: int) -> Cluster:
    """What the times that this process measures on a type of device are valid for."""
    if device_type == "cuda":
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    else:
        name = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return Cluster(
        device_type=device_type, device=name, ranks=ranks, ranks_per_host=ranks_per_host() or ranks,
        torch=torch.__version__,
    )  # fmt: skip


def load_hardware(path: str | os.PathLike[str]) -> Hardware:
    """Hardware out of the file of a calibration, on any machine.

    Raises:
        ConfigError: If the file cannot be read, or is none that `fsdp-compile calibrate` has written.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return _hardware(Calibration.of_text(text), Path(path), hashlib.sha256(text.encode()).hexdigest()[:16])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
        raise ConfigError(
            f"{os.fspath(path)} is no file of measured hardware, or was cut off: {type(error).__name__}: {error}",
            where="options={'hardware': ...}",
            instead="fsdp-compile calibrate, which writes one; or fsdp_compile.cost.hardware.hardware(device, link)",
        ) from error


def refuse_elsewhere(planned_for: Hardware | None, device_type: str, ranks: int) -> None:
    """Raises `ConfigError` if hardware was measured on another cluster than the one that this process runs on."""
    there = None if planned_for is None else planned_for.cluster
    if there is None:
        return
    here = this_cluster(device_type, ranks)
    if dataclasses.replace(here, digest=there.digest) != there:
        raise ConfigError(
            f"{there.file} was measured elsewhere: on {there}, and this is {here}",
            where="options={'hardware': ...}",
            instead="fsdp-compile calibrate on this cluster, started as the job is",
        )


def _hardware(found: Calibration, file: Path, digest: str) -> Hardware:
    source = f"measured, {file.name}"
    cluster = dataclasses.replace(found.cluster, file=str(file), digest=digest)
    base, local = cluster.data_sheet, cluster.ranks_per_host
    near = [table for table in found.collectives if table.on_one_host == table.ranks]
    far = [table for table in found.collectives if table.on_one_host != table.ranks]
    device = dataclasses.replace(
        _device(base, found, source), name=cluster.device, near=_fitted(base.near, near, local, source)
    )
    network = hardware(base.name, network_of(base)).link
    # One rank alone says nothing of hosts with more.
    return Hardware(device, _fitted(network, far, local, source), local if cluster.ranks > 1 else None, cluster)


def _device(base: Device, found: Calibration, source: str) -> Device:
    one = Quantity(1.0, "share", f"{source}: what was reached")
    measured = {key: Quantity(value, "FLOP/s", source) for key, value in found.matmul.items()}
    # What was not measured reaches as much of its peak as the fastest dtype that was.
    peaks = {str(dtype).removeprefix("torch."): peak for dtype, peak in base.matmul.items()}
    best = max(found.matmul.keys() & peaks.keys(), key=found.matmul.__getitem__)
    share = found.matmul[best] / peaks[best].value

    def reached(key: str, peak: Quantity) -> Quantity:
        rest = Quantity(peak.value * share, "FLOP/s", f"{peak.source}, times the share that {best} reached, {source}")
        return measured.get(key, rest)

    host = base.host
    if found.host_bytes_per_s is not None:
        host = dataclasses.replace(host, rate=Quantity(found.host_bytes_per_s, "byte/s", source), rate_share=one)
    return dataclasses.replace(
        base,
        matmul={dtype: reached(str(dtype).removeprefix("torch."), peak) for dtype, peak in base.matmul.items()},
        tf32=None if base.tf32 is None else reached(TF32, base.tf32),
        matmul_share=one,
        memory_rate=Quantity(found.memory_bytes_per_s, "byte/s", source),
        memory_share=one,
        memory=Quantity(found.memory_bytes, "byte", source),
        host=host,
    )


def _fitted(link: Link, tables: list[MeasuredCollective], ranks_per_host: int, source: str) -> Link:
    """A link with measured times, and with a formula that fits the largest all-gather among them."""
    gathers = [table for table in tables if table.kind == KINDS[0]]
    if not gathers:
        return link
    largest = max(gathers, key=lambda table: table.ranks)
    (_, least_us), (size, before_us), (last, last_us) = largest.points[0], *largest.points[-2:]
    rising = last_us > before_us
    per_rank = (last - size) * 1e6 / (last_us - before_us) if rising else last * 1e6 / last_us
    # The rate of one port, of which the group's ring uses several, or a part.
    used = dataclasses.replace(link, rate=Quantity(1.0, "", ""), rate_share=Quantity(1.0, "", ""))
    ports = used.ring_bytes_per_s(largest.on_one_host or largest.ranks, ranks_per_host)
    slower = least_us / link.formula_us(0.0, largest.ranks, 1.0)
    return dataclasses.replace(
        link,
        rate=Quantity(per_rank / ports, "byte/s", source),
        rate_share=Quantity(1.0, "share of rate", f"{source}: what was reached"),
        launch=Quantity(link.launch.value * slower, "us", source),
        hop=Quantity(link.hop.value * slower, "us", f"{source}, growing with log2 of the ranks"),
        measured=tuple(tables),
    )
