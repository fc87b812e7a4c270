"""The only module of the benchmarks that imports private names of torch. Checked on torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

from fsdp_compile._torch.distributed import fake_store

__all__ = ["StorageInfo", "fake_store", "fresh_cache", "inductor_config", "sleep_on_device"]


def sleep_on_device(cycles: int) -> None:
    """Keeps the current CUDA stream busy for a number of clock cycles, with one thread."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call, unused-ignore]
