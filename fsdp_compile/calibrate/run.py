"""Measures the cluster that runs: all ranks together, in about the time that is given."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_compile.calibrate.collectives import measure_kind, spreads
from fsdp_compile.calibrate.device import copy_rate, host_copy_rate, matmul_rates, memory_bytes
from fsdp_compile.cost.calibrated import KINDS, Calibration, this_cluster
from fsdp_compile.errors import ConfigError

_SHARE_OF_LINKS = 0.8
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
    groups = spreads(device.type) if ranks > 1 else []
    each_s = seconds * _SHARE_OF_LINKS / max(1, len(groups) * len(KINDS))
    return Calibration(
        cluster=cluster,
        matmul=matmul_rates(device, agree),
        memory_bytes_per_s=copy_rate(device, agree),
        host_bytes_per_s=host_copy_rate(device, agree),
        memory_bytes=memory_bytes(device),
        collectives=tuple(measure_kind(kind, group, device, each_s, agree) for group in groups for kind in KINDS),
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
