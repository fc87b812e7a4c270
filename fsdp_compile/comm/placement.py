"""The ranks of a command, their devices and their launcher; torch is imported only where GPUs are counted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fsdp_compile.errors import ConfigError

TIMEOUT_S = 60.0
"""How long ranks wait for each other unless the user says otherwise."""


class DeviceKind(StrEnum):
    """Where a run computes; AUTO takes GPUs where every local rank has one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"

    def resolve(self, local_ranks: int) -> DeviceKind:
        """CPU or CUDA, for so many ranks on this host; `ConfigError` if CUDA was chosen and there are fewer GPUs."""
        gpus = _count_gpus()
        if self is DeviceKind.CUDA and gpus < local_ranks:
            what = f"{local_ranks} ranks need a GPU each and this host has {gpus}"
            raise ConfigError(what, where="--device cuda", instead="fewer --ranks, or --device cpu")
        if self is DeviceKind.AUTO:
            return DeviceKind.CUDA if gpus >= local_ranks else DeviceKind.CPU
        return self


@dataclass(frozen=True)
class Placement:
    """Where ranks are to run.

    `wanted` is their number on all hosts (`None`: one per GPU of this host, or 2 without), and `started_here` how many
    a launcher has started on this host, this process being one (`None` without a launcher).
    """

    wanted: int | None
    started_here: int | None = None

    @classmethod
    def find(cls, ranks: int | None, environment: Mapping[str, str] = os.environ) -> Placement:
        """Join the ranks of an elastic launcher, or ask for `ranks` local ones.

        Raises:
            ConfigError: The number is not positive, or not that of the launcher.
        """
        if ranks is not None and ranks < 1:
            raise ConfigError(f"there cannot be {ranks} ranks", where="--ranks", instead="1 or more")
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return cls(ranks)
        started = int(environment["WORLD_SIZE"])
        if ranks not in (None, started):
            what = f"the launcher has started {started} ranks, not {ranks}"
            raise ConfigError(what, where="--ranks", instead="leave --ranks away below torchrun")
        return cls(started, int(environment.get("LOCAL_WORLD_SIZE", "1")))

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.wanted or _count_gpus() or 2


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often an elastic launcher has started this process again."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launcher_folder(environment: Mapping[str, str] = os.environ) -> str:
    """The folder of reports of the elastic launcher that has started this process; "" where it has none.

    Each launcher makes one of its own, which stays the same when it starts processes again.
    """
    file = environment.get("TORCHELASTIC_ERROR_FILE")  # <folder>/attempt_<restart>/<rank>/error.json
    return str(Path(file).parents[2]) if file else ""


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
