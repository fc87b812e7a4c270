"""Process groups: the default mesh, and names for groups that are the same on every rank.

torch names the group of a mesh dimension after its ranks, so ranks of one HSDP mesh would compile different graphs.
Graphs name our aliases instead: `fsdp.shard.0` is, on each rank, the group that this rank shards over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compile._torch.distributed import default_store, register_group_alias, resolve_group, serial_gloo_group
from fsdp_compile.errors import ConfigError

_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REAL_BACKENDS = ("gloo", "nccl", "xccl", "mpi")
"""Backends whose ranks are processes, unlike those of the fake one."""


@dataclasses.dataclass(frozen=True, eq=False)
class RankStore:
    """The part of the world's store through which the ranks of a group meet; equal to no other one.

    Attributes:
        prefix: Of all keys; the same on all ranks of the group, and never used again in the life of the store.
        ranks: Of the group, by their numbers in the world.
        rank: The number of this one in the group.
        agreed: Digests of what this rank has compared with the others, and of refusals, in that order.
        sharding_calls: Numbers for the calls that shard over the group.
    """

    prefix: str
    ranks: tuple[int, ...]
    rank: int
    agreed: list[str] = dataclasses.field(default_factory=list)
    sharding_calls: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup) -> RankStore:
        """A new one for a group; all of its ranks call this together, so that they count alike."""
        ranks = tuple(dist.get_process_group_ranks(group))
        prefix = f"fsdp_compile/{name}/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        # Worlds of one store may follow each other: each rank counts how often it was in this group.
        count = default_store().add(f"{prefix}/worlds/{group.rank()}", 1)
        return cls(f"{prefix}/{count}", ranks, group.rank())

    @property
    def timeout_s(self) -> float:
        """How long the world's store waits for a key: as long as its collectives, unless the user made it."""
        store = default_store()
        while isinstance(store, dist.PrefixStore):  # has a timeout of its own, which says nothing
            store = store.underlying_store
        return store.timeout.total_seconds()  # type: ignore[attr-defined]

    def store(self) -> dist.Store:
        """The store of the world, with this prefix."""
        return dist.PrefixStore(self.prefix, default_store())


_WeakGroup = weakref.ref[dist.ProcessGroup]


@dataclasses.dataclass(frozen=True)
class _Alias:
    """What a name stands for: `used` runs the collectives; its ranks, if they are processes, compare in `meeting`."""

    role: str
    used: _WeakGroup
    meeting: RankStore | None

    def is_alive(self, name: str) -> bool:
        used = self.used()
        return used is not None and resolve_group(name) is used


class _Registry:
    """Groups by the names under which graphs find them, as in torch's own registry: one for the process.

    Attributes:
        aliases: By name.
        made: Groups that were made here, by their purpose and ranks: one for all models and meshes of a world.
        meshes: Hybrid meshes that were made here, by device type and shape, each with its world.
    """

    def __init__(self) -> None:
        # Weak references to groups: none stays alive, with its threads, after its world was destroyed.
        self.aliases: dict[str, _Alias] = {}
        self.made: dict[tuple[str, tuple[int, ...]], _WeakGroup] = {}
        self.meshes: dict[tuple[str, tuple[int, int]], tuple[_WeakGroup, DeviceMesh]] = {}

    def forget_gone_worlds(self) -> None:
        """Drops entries of worlds that were destroyed; their names may be used again."""
        for name in [name for name, known in self.aliases.items() if not known.is_alive(name)]:
            del self.aliases[name]
        for key in [key for key, (world, _) in self.meshes.items() if world() is not dist.group.WORLD]:
            del self.meshes[key]


registry = _Registry()
GroupRole = Literal["shard", "replicate", "post_forward", "reduce"]


def alias_of(group: dist.ProcessGroup, role: GroupRole) -> str:
    """The rank-independent name of `group`; names are numbered in the order of first use, alike on every rank.

    All ranks of the group must call this together: for gloo, and for a "reduce" group, a second group of the same ranks
    is made.
    """
    aliases = registry.aliases
    registry.forget_gone_worlds()
    used = _used(group, role)
    for name, known in aliases.items():
        if known.used() is used and known.role == role:  # meshes of the same ranks share the name, too
            return name
    names = (f"fsdp.{role}.{number}" for number in itertools.count())
    name = next(name for name in names if name not in aliases)
    register_group_alias(name, used)
    place = RankStore.of(name, group) if group.size() > 1 and _has_processes(group) else None
    aliases[name] = _Alias(role, weakref.ref(used), place)
    return name


def _used(group: dist.ProcessGroup, role: GroupRole) -> dist.ProcessGroup:
    """The group that runs the collectives of a group in a role."""
    if group.size() == 1:
        return group
    ranks = tuple(dist.get_process_group_ranks(group))
    # One collective at a time: see `serial_gloo_group`.
    if _is_gloo(group):
        return _made_once(f"{role} on gloo", ranks, serial_gloo_group)
    # Collectives of one group wait for each other, so all-gathers would wait for reductions.
    return group if role != "reduce" else _made_once(role, ranks, _new_group)


def _made_once(
    purpose: str, ranks: tuple[int, ...], make: Callable[[Sequence[int]], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """The group of some ranks for a purpose; they call this together if there is none in this world yet."""
    known = registry.made.get((purpose, ranks))
    found = None if known is None else known()
    if found is None or resolve_group(found.group_name) is not found:  # destroyed, by itself or with its world
        found = make(ranks)
        registry.made[purpose, ranks] = weakref.ref(found)
    return found


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def rank_store(name: str) -> RankStore | None:
    """Where the ranks of a named group meet; `None` for a group of one rank, or of ranks that are no processes."""
    alias = registry.aliases.get(name)
    return alias.meeting if alias is not None and alias.is_alive(name) else None


def rank_stores() -> list[RankStore]:
    """Those of all groups of this rank."""
    return [place for name in registry.aliases if (place := rank_store(name)) is not None]


def _has_processes(group: dist.ProcessGroup) -> bool:
    # `get_backend` says "undefined" of a world that was started without naming one; the configuration never does.
    return any(name in str(dist.get_backend_config(group)) for name in _REAL_BACKENDS)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo runs a group's collectives; a world that was started without naming a backend says "undefined"."""
    return dist.get_backend(group) == "gloo" or str(dist.get_backend_config(group)) == "cpu:gloo"


def run_of(group: dist.ProcessGroup, length: int) -> dist.ProcessGroup:
    """The group of this rank's run of `length` neighbours in `group`; all ranks of `group` must call this together."""
    ranks = dist.get_process_group_ranks(group)
    begin = ranks.index(dist.get_rank()) // length * length
    return _made_once("run", tuple(ranks[begin : begin + length]), _new_group)


def mesh_once(device_type: str, shape: tuple[int, int]) -> DeviceMesh:
    """The mesh (replicate, shard) of the world of one shape, for all models. All ranks call this together."""
    registry.forget_gone_worlds()
    known = registry.meshes.get((device_type, shape))
    if known is None:
        world = dist.group.WORLD
        assert world is not None
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "fsdp"))
        known = registry.meshes[device_type, shape] = (weakref.ref(world), mesh)
    return known[1]


def default_mesh(device_type: str) -> DeviceMesh:
    """A 1-D mesh over the whole world, which is started from torchrun's environment if need be.

    Raises:
        ConfigError: If there is neither a process group nor torchrun's environment.
    """
    if not dist.is_initialized():
        _start_world(device_type)
    # Without names, as FSDP2's: DTensors on meshes with other names do not mix.
    return init_device_mesh(device_type, (dist.get_world_size(),))


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
    """Raises `ConfigError` for a mesh that is neither 1-D (shard) nor 2-D (replicate, shard)."""
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
