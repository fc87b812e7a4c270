"""Process groups: the default mesh, and names for groups that are the same on every rank.

Torch names the group of a mesh dimension after its ranks, so ranks of one HSDP mesh would compile different graphs.
Graphs name our aliases instead: `fsdp.shard.0` is, on each rank, the group that this rank shards over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compile._torch.distributed import default_store, register_group_alias, resolve_group, serial_gloo_group
from fsdp_compile.errors import ConfigError

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REAL_BACKENDS = ("gloo", "nccl", "xccl", "mpi")
"""Parts of the names of backends behind whose ranks there are processes."""


@dataclasses.dataclass(frozen=True, eq=False)
class RankStore:
    """Where the ranks of a group find each other in the store of the world; equal to no other one.

    Attributes:
        prefix: Of all keys; the same on all ranks of the group, and never the same again in the life of the store.
        ranks: Of the group, by their numbers in the world.
        rank: The number of this one in the group.
        agreed: Digests of what this rank has compared with the others here, and of refusals, in that order.
    """

    prefix: str
    ranks: tuple[int, ...]
    rank: int
    agreed: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup) -> RankStore:
        """A new place for a group. All of its ranks call this together, so that they count alike."""
        ranks = tuple(dist.get_process_group_ranks(group))
        prefix = f"fsdp_compile/{name}/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        # Worlds of one store may follow each other: each rank counts how often it was in this group.
        count = default_store().add(f"{prefix}/worlds/{group.rank()}", 1)
        return cls(f"{prefix}/{count}", ranks, group.rank())

    @property
    def timeout_s(self) -> float:
        """How long the world's store waits for a key: as long as its collectives wait, unless the user made it."""
        store = default_store()
        while isinstance(store, dist.PrefixStore):  # has a timeout of its own, which says nothing
            store = store.underlying_store
        return store.timeout.total_seconds()  # type: ignore[attr-defined]

    def store(self) -> dist.Store:
        """The store of the world, with the prefix of this place."""
        return dist.PrefixStore(self.prefix, default_store())


@dataclasses.dataclass(frozen=True)
class _Alias:
    """What a name stands for: `used` runs the collectives of `group`, whose ranks meet in `meeting`, if any."""

    role: str
    group: dist.ProcessGroup
    used: dist.ProcessGroup
    meeting: RankStore | None

    def is_alive(self, name: str) -> bool:
        return resolve_group(name) is self.used


_aliases: dict[str, _Alias] = {}
_runs: dict[tuple[str, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""Runs of neighbours by the name of their group and their length, each with that group."""
GroupRole = Literal["shard", "replicate", "post_forward", "reduce"]


def alias_of(group: dist.ProcessGroup, role: GroupRole) -> str:
    """The rank-independent name of `group`; names are numbered in the order of first use, alike on every rank.

    All ranks of the group must call this together: for gloo, and for a "reduce" group, the name stands for a second
    group of the same ranks; with gloo it runs one collective at a time.
    """
    for name in [n for n, known in _aliases.items() if not known.is_alive(n)]:
        del _aliases[name]  # its world was destroyed; the number is free again
    for name, known in _aliases.items():
        if known.group is group and known.role == role:
            return name
    name = f"fsdp.{role}.{sum(known.role == role for known in _aliases.values())}"
    used = _used(group, role)
    register_group_alias(name, used)
    place = RankStore.of(name, group) if group.size() > 1 and _has_processes(group) else None
    _aliases[name] = _Alias(role, group, used, place)
    return name


def _used(group: dist.ProcessGroup, role: GroupRole) -> dist.ProcessGroup:
    """What runs the collectives of a group in a role: gathers do not wait for what a "reduce" group does."""
    if group.size() == 1:
        return group
    if _is_gloo(group):
        return serial_gloo_group(group)
    if role != "reduce":
        return group
    made = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def rank_store(name: str) -> RankStore | None:
    """Where the ranks of a named group meet; `None` for a group of one rank, or of ranks that are no processes."""
    alias = _aliases.get(name)
    return alias.meeting if alias is not None and alias.is_alive(name) else None


def rank_stores() -> list[RankStore]:
    """Those of all groups that this rank is in."""
    return [place for name in _aliases if (place := rank_store(name)) is not None]


def _has_processes(group: dist.ProcessGroup) -> bool:
    # `get_backend` says "undefined" of a world that was started without naming one; the configuration never does.
    return any(name in str(dist.get_backend_config(group)) for name in _REAL_BACKENDS)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo runs a group's collectives; a world that was started without naming a backend says "undefined"."""
    return dist.get_backend(group) == "gloo" or str(dist.get_backend_config(group)) == "cpu:gloo"


def run_of(group: dist.ProcessGroup, length: int) -> dist.ProcessGroup:
    """The group of this rank's run of `length` neighbours in `group`; all ranks of `group` must call this together."""
    known = _runs.get((group.group_name, length))
    if known is not None and known[0] is group:
        return known[1]
    ranks = dist.get_process_group_ranks(group)
    begin = ranks.index(dist.get_rank()) // length * length
    made = dist.new_group(ranks[begin : begin + length], use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    _runs[group.group_name, length] = (group, made)
    return made


def default_mesh(device_type: str) -> DeviceMesh:
    """A 1-D mesh over the whole world, which is started from torchrun's environment if need be.

    Raises:
        ConfigError: If there is neither a process group nor torchrun's environment.
    """
    if not dist.is_initialized():
        _start_world(device_type)
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _start_world(device_type: str) -> None:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"no process group is initialized, and torchrun's environment lacks {', '.join(missing)}",
            where="backend='fsdp'",
            instead="start the script with `torchrun --nproc-per-node N script.py`, or call "
            "torch.distributed.init_process_group() before the first step",
        )
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuses a mesh that is neither 1-D (shard) nor 2-D (replicate, shard).

    Raises:
        ConfigError: If it has another number of dimensions.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}, not a DeviceMesh",
            where="fully_shard(mesh=...)",
            instead='init_device_mesh("cuda", (world_size,))',
        )
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"mesh has {mesh.ndim} dimensions",
            where="fully_shard(mesh=...)",
            instead="a 1-D mesh to shard over, or a 2-D mesh (replicate, shard); take the two dimensions from a larger "
            'mesh with mesh["replicate", "shard"]',
        )
