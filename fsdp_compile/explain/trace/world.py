"""A process group to plan in: the one that is there, or a private one whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile._torch.distributed import fake_store
from fsdp_compile.comm.mesh import HYBRID, hybrid_mesh
from fsdp_compile.config.choices import check_world_size
from fsdp_compile.errors import ConfigError


@contextmanager
def planning_world(world_size: int | None) -> Iterator[int]:
    """Makes sure that there is a default group of `world_size` ranks.

    Args:
        world_size: Ranks to plan for; `None` for those of the group that is initialized.

    Yields:
        The number of ranks. A group that was made for this is destroyed at the end.

    Raises:
        ConfigError: If a group of another size is initialized, or there is none and no size is given.
    """
    if dist.is_initialized():
        held = dist.get_world_size()
        if world_size not in (None, held):
            raise ConfigError(
                f"a process group of {held} ranks is initialized, and the plan is for {world_size}",
                where="explain(world_size=...)",
                instead=f"world_size={held}, or explain() in a process without a process group",
            )
        yield held
        return
    world_size = check_world_size(world_size)
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=world_size)
    try:
        yield world_size
    finally:
        dist.destroy_process_group()


def planning_mesh(strategy: ShardingStrategy | None) -> DeviceMesh:
    """A mesh of a strategy's dimension over the default group, on the device that plans are traced for."""
    if strategy in HYBRID:
        return hybrid_mesh("cpu")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
