"""This process among the ranks: its rank, its device, its process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from fsdp_compile._torch.distributed import store_of_this_start
from fsdp_compile.comm.groups import start_world
from fsdp_compile.comm.placement import TIMEOUT_S, DeviceKind

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks as one of them sees them. Every rank calls each of its collectives, with tensors on `device`."""

    rank: int
    size: int
    device: torch.device

    def any(self, value: Tensor) -> bool:
        """Whether a 0-d tensor is true on any rank."""
        found = value.detach().int()
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, any picklable objects, in rank order."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]


@contextmanager
def join_world(kind: DeviceKind, timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """Join the process group that an elastic launcher's variables describe, and leave it when all went well.

    CPU joins through gloo, CUDA through NCCL with the GPU of this local rank; a rank waits `timeout_s` for others.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = store_of_this_start(store)  # or addresses of ranks that are gone would be read
    device = start_world(kind, timeout=timeout, store=store, rank=rank, world_size=size)
    yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    # Not after an error: other ranks would report lost connections before this one has reported its error.
    dist.destroy_process_group()
