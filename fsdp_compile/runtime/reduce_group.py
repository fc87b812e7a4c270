"""Which process group reduces gradients: that of the all-gathers, or a second one, which runs concurrently."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_compile.comm.groups import alias_of
from fsdp_compile.runtime.group_state import ReduceGroup
from fsdp_compile.runtime.units import FSDPUnit


def reduce_alias(unit: FSDPUnit) -> str:
    """Name of the group that only reduces; empty if there is none. All ranks call this together the first time."""
    where = unit.policy.mesh_placement
    if unit.reduce_group is ReduceGroup.SHARED or where.shard_dim is None or where.size == 1:
        return ""
    return alias_of(where.mesh.get_group(where.shard_dim), "reduce")


def set_reduce_group(units: Iterable[FSDPUnit], queue: ReduceGroup) -> list[FSDPUnit]:
    """Chooses the group of some units; returns those for which it is another one now."""
    changed = [unit for unit in units if unit.reduce_group is not queue]
    for unit in changed:
        unit.reduce_group = queue
    return changed
