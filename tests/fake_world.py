"""A default process group of any size in one process: collectives return at once and move no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(world_size: int, *, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Be `rank` of a default group of `world_size` ranks that do not exist.

    Args:
        world_size: Number of ranks, 1 or more.
        rank: Which of them this process is.

    Yields:
        The default group, destroyed at the end.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()
