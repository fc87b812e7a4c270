"""How process groups are made on NCCL: streams of high priority, and communicators that need no other ranks.

A rank's matmuls fill the device, so the few blocks of a collective would wait for them on a stream of equal priority.
FSDP2 runs its collectives on streams of high priority; here each group has its own stream, whose priority is an option.
`TORCH_NCCL_HIGH_PRIORITY=1` is torch's setting for the groups that scripts make.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def high_priority(backends: str, timeout: timedelta | None = None) -> Any:
    """Options of a group whose collectives run on a stream of high priority; `None` where NCCL runs none of them.

    Args:
        backends: Names of the group's backends, in any text.
        timeout: Of the group; NCCL's default if not given.
    """
    if "nccl" not in backends or not dist.is_nccl_available():
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    if timeout is not None:
        options._timeout = timeout  # torch warns where it is another one than the group's
    return options


def new_group(ranks: Sequence[int], timeout: timedelta, description: str) -> dist.ProcessGroup:
    """A group of some ranks on the backends of the world; they call this together, and no other rank has to.

    Its communicator is made at once where that of the world was.
    """
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    with _not_split_off(world) if len(ranks) < world.size() else contextlib.nullcontext():
        made = dist.new_group(
            list(ranks),
            timeout=timeout,
            pg_options=high_priority(str(dist.get_backend_config(world)), timeout),
            use_local_synchronization=True,
            group_desc=description,
            device_id=device,
        )
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextlib.contextmanager
def _not_split_off(world: dist.ProcessGroup) -> Iterator[None]:
    """Groups that are made meanwhile get communicators of their own.

    Torch splits them off a world that is bound to a device, which NCCL does when all ranks of the world take part.
    """
    bound: torch.device | None = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound
