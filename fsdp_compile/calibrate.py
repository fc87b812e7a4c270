"""Measures a cluster once, for the plans of all jobs on it: `fsdp-compile calibrate`.

All ranks measure together: collectives by message size, in the groups that a world of hosts has; then what a device
reaches in matmuls by dtype, in copies in its memory and in copies from the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from fsdp_compile._torch.distributed import resolve_group
from fsdp_compile.comm.groups import GroupRole, alias_of, default_mesh, mesh_of_shape
from fsdp_compile.cost.calibrated import KINDS, TF32, Calibration, this_cluster
from fsdp_compile.cost.hardware import DEVICES, MeasuredCollective, device_reported_as, share_of_others
from fsdp_compile.errors import ConfigError
from fsdp_compile.layout.hosts import GroupRanks, ranks_per_host

Agree = Callable[[float], float]
"""From a time of this rank to the longest of all ranks."""

_WARM_UP: Final = 1
"""Runs that are not counted: the first one may pick a kernel or allocate memory."""
_ROUNDS: Final = 5
_GROWTH: Final = 8
_SIZES: Final = {"cpu": tuple(4096 * _GROWTH**n for n in range(6)), "cuda": tuple(4096 * _GROWTH**n for n in range(7))}
"""Bytes of whole messages: up to 128 MB through the host's memory, up to 1 GB on GPUs."""
_LARGEST: Final = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the largest factors."""
_LONG_US: Final = 20_000.0
"""Matmuls that take so long are large enough."""
_COPIED_BYTES: Final = {"cpu": 64 * 10**6, "cuda": 256 * 10**6}
_SHARE_OF_LINKS: Final = 0.8
"""Share of the time for collectives; what a device reaches is known sooner."""


def calibrate(device: torch.device, seconds: float = 60.0) -> Calibration:
    """Measures collectives of the world's groups, matmuls and copies.

    Every rank of the world calls this, and gets the same numbers: those of the slowest one. Without a process group
    only the device is measured.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1

    def agree(time_us: float) -> float:
        if ranks == 1:
            return time_us
        slowest = torch.tensor([time_us], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.item())

    cluster = this_cluster(device.type, ranks)
    memory_bytes = (
        DEVICES["cpu"].memory.value  # what plans assume of one rank
        if device.type == "cpu"
        else torch.cuda.get_device_properties(device).total_memory
    )
    groups = _spreads(device.type) if ranks > 1 else []
    each_s = seconds * _SHARE_OF_LINKS / max(1, len(groups) * len(KINDS))
    return Calibration(
        cluster=cluster,
        matmul=_matmul_rates(device, agree),
        memory_bytes_per_s=_copy_rate(device, agree),
        host_bytes_per_s=None if device.type == "cpu" else _copy_rate(device, agree, from_host=True),
        memory_bytes=float(memory_bytes),
        collectives=tuple(_measure_kind(kind, group, device, each_s, agree) for group in groups for kind in KINDS),
    )


def save(found: Calibration, path: Path) -> None:
    """Writes the file, at once: whoever reads it finds all or nothing, also where several hosts share the folder.

    Raises:
        ConfigError: If it cannot be written.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    written = path.with_name(f"{path.name}.{rank}.{os.getpid()}")
    try:
        written.write_text(found.to_text(), encoding="utf-8")
        written.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", instead="a path in a folder that exists") from error
    finally:
        with contextlib.suppress(OSError):
            written.unlink()  # there only if it could not take the place of the file


def median_us(run: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Time in us of a run, all that it starts on the device included: the median out of so many."""
    samples = []
    wait: Callable[[torch.device], object] = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    with torch.no_grad():
        for _ in range(_WARM_UP + rounds):
            wait(device)
            start_s = time.perf_counter()
            run()
            wait(device)
            samples.append((time.perf_counter() - start_s) * 1e6)
    return statistics.median(samples[_WARM_UP:])


@dataclasses.dataclass(frozen=True)
class _Spread:
    """This rank's group among groups of one kind, all of which send at once.

    Attributes:
        on_one_host: How many of its ranks share a host.
    """

    group: dist.ProcessGroup
    ranks: int
    on_one_host: int


def _spreads(device_type: str) -> list[_Spread]:
    """The kinds of groups that jobs have: the world, the ranks of a host, and one rank of each host.

    All ranks of the world call this together.
    """
    world = default_mesh(device_type)
    ranks = world.size()
    local = ranks_per_host() or ranks
    found = [_spread(world.get_group(), "shard", GroupRanks(ranks), local)]
    if 1 < local < ranks and ranks % local == 0:
        mesh = mesh_of_shape(device_type, (ranks // local, local))
        found.append(_spread(mesh.get_group("fsdp"), "shard", GroupRanks(local), local))
        found.append(_spread(mesh.get_group("dp_replicate"), "replicate", GroupRanks(ranks // local, local), local))
    return found


def _spread(group: dist.ProcessGroup, role: GroupRole, ranks: GroupRanks, local: int) -> _Spread:
    used = resolve_group(alias_of(group, role))  # the one that runs the collectives of compiled graphs
    assert used is not None
    return _Spread(used, ranks.size, ranks.on_one_host(local))


def _measure_kind(kind: str, spread: _Spread, device: torch.device, seconds: float, agree: Agree) -> MeasuredCollective:
    """Times of one kind of collective, as many sizes as there is time for, but two at least.

    All ranks of the world call this together, and get the same numbers.
    """
    points: list[tuple[float, float]] = []
    left_us = seconds * 1e6
    for size_bytes in _SIZES[device.type]:
        run, sent_bytes = _prepared(kind, size_bytes, spread, device)
        if points and sent_bytes <= points[-1][0]:
            continue  # so many ranks that no message is as small
        dist.barrier()
        time_us = agree(median_us(run, device))
        # A larger message takes no less time, so that the rate between two is a positive one.
        points.append((sent_bytes, max(time_us, points[-1][1] if points else 0.0)))
        left_us -= time_us * (_WARM_UP + _ROUNDS)
        if len(points) > 1 and left_us < time_us * _GROWTH * (_WARM_UP + _ROUNDS):
            break
    return MeasuredCollective(kind, spread.ranks, tuple(points), spread.on_one_host)


def _prepared(kind: str, size_bytes: int, spread: _Spread, device: torch.device) -> tuple[Callable[[], object], float]:
    """A collective of about `size_bytes` in all, and the bytes that each rank sends in it."""
    group, ranks = spread.group, spread.ranks
    part = torch.zeros(-(-size_bytes // (4 * ranks)), device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    sent_bytes = 4 * whole.numel() * share_of_others(ranks)
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, part, group=group), sent_bytes),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole, group=group), sent_bytes),
        "all-reduce": (lambda: dist.all_reduce(whole, group=group), 2 * sent_bytes),
    }
    assert calls.keys() == set(KINDS)
    return calls[kind]


def _matmul_rates(device: torch.device, agree: Agree) -> dict[str, float]:
    """FLOP/s of large square matmuls by dtype, of the slowest rank; "tf32" for float32 with inputs rounded to it."""
    found = {"bfloat16": _matmul_rate(torch.bfloat16, device, agree)}
    with _float32_matmuls("ieee"):
        found["float32"] = _matmul_rate(torch.float32, device, agree)
    if device.type == "cuda" and device_reported_as(torch.cuda.get_device_name(device)).tf32 is not None:
        with _float32_matmuls(TF32):
            found[TF32] = _matmul_rate(torch.float32, device, agree)
    return found


@contextlib.contextmanager
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
        time_us = agree(median_us(lambda: a @ b, device))  # noqa: B023
    return 2 * size**3 * 1e6 / time_us


def _copy_rate(device: torch.device, agree: Agree, *, from_host: bool = False) -> float:
    """Bytes per second of a large copy on the slowest rank: read and written in its memory, or from pinned memory."""
    numel = _COPIED_BYTES[device.type] // 4
    source = torch.zeros(numel, pin_memory=True) if from_host else torch.zeros(numel, device=device)
    target = torch.zeros_like(source, device=device)
    time_us = agree(median_us(lambda: target.copy_(source, non_blocking=True), device))
    return (1 if from_host else 2) * 4 * numel * 1e6 / time_us
