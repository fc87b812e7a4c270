"""`fsdp-compile calibrate`: measures the cluster that it runs on, for the plans of later jobs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_compile.cli.arguments import add_backend
from fsdp_compile.comm.placement import TIMEOUT_S, DeviceKind, Placement
from fsdp_compile.errors import ConfigError

if TYPE_CHECKING:
    from fsdp_compile.cost.calibrated import Calibration

NAME = "calibrate"
ABOUT = "Measure collectives, matmuls and copies of this cluster into a file, for options={'hardware': FILE}."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the file is written, and how long it may take."""
    parser.description = f"{ABOUT} It runs below torchrun on all ranks of a job, or alone for what one device reaches."
    parser.add_argument(
        "--out", type=Path, default=Path("hardware.json"), metavar="FILE", help="on each host (default: hardware.json)"
    )
    add_backend(parser)
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="X", help="about how long to measure (default: 60)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, and writes the file on each host.

    Raises:
        ConfigError: If the file cannot be written, the time is none, or there are fewer devices than ranks.
    """
    if not 0 < arguments.seconds <= 24 * 3600:
        raise ConfigError(
            f"cannot measure for {arguments.seconds} s",
            where="--seconds",
            instead="more than 0 and at most a day, as 60",
        )
    if not arguments.out.parent.is_dir():
        raise ConfigError(f"there is no folder {arguments.out.parent}", where="--out", instead="one that exists")
    if arguments.out.is_dir():
        raise ConfigError(f"{arguments.out} is a folder", where="--out", instead=f"{arguments.out / 'hardware.json'}")
    placement = Placement.find(None)
    kind = DeviceKind(arguments.device).resolve(placement.started_here or 1)
    # Whatever is refused above is refused without measuring.
    import torch

    from fsdp_compile.calibrate import calibrate, save
    from fsdp_compile.comm.groups import join_world

    if placement.started_here is None:
        found = calibrate(torch.device(kind.value), arguments.seconds)
        save(found, arguments.out)
    else:
        with join_world(kind, max(TIMEOUT_S, 2 * arguments.seconds)) as world:
            found = calibrate(world.device, arguments.seconds)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                save(found, arguments.out)
            if world.rank != 0:
                return 0
    print(_summary(found, arguments.out), end="")
    return 0


def _summary(found: Calibration, path: Path) -> str:
    """What was measured, a line each."""
    lines = [f"{found.cluster}", f"copies {found.memory_bytes_per_s / 1e9:.4g} GB/s"]
    lines += [f"matmuls of {dtype} {rate / 1e12:.4g} TFLOP/s" for dtype, rate in found.matmul.items()]
    for table in found.collectives:
        (_, least_us), *_, (sent, most_us) = table.points
        lines.append(
            f"{table.kind} over {table.ranks} ranks, {table.on_one_host} on one host: {least_us:.0f} us, "
            f"{sent / most_us / 1e3:.4g} GB/s of {sent / 1e6:.4g} MB sent"
        )
    return "\n".join([*lines, f'wrote {path}: options={{"hardware": "{path}"}}']) + "\n"
