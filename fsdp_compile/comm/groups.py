"""Process groups: the default mesh, and names for groups that are the same on every rank.

torch names the group of a mesh dimension after its ranks, so ranks of one HSDP mesh would compile different graphs.
Graphs name our aliases instead: `fsdp.shard.0` is, on each rank, the group that this rank shards over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from fsdp_compile._torch import distributed as private
from fsdp_compile.comm.failures import AnsweringStore, remember_world
from fsdp_compile.comm.placement import TIMEOUT_S, DeviceKind
from fsdp_compile.comm.rendezvous import Rendezvous
from fsdp_compile.errors import ConfigError

T = TypeVar("T")
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
        compiles: Numbers for the comparisons of what ranks compile, and for refusals in their place.
        plans: The orders of collectives that all ranks run, by a digest of what their graphs read.
    """

    prefix: str
    ranks: tuple[int, ...]
    rank: int
    compiles: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    plans: dict[str, list[tuple[str, ...]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, name: str, ranks: tuple[int, ...]) -> RankStore:
        """A new one for ranks, which call this together, so that they count alike."""
        prefix = f"fsdp_compile/{name}/{hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
        rank = ranks.index(dist.get_rank())
        # Worlds of one store may follow each other: each rank counts how often it was in this group.
        store = AnsweringStore(private.default_store(), world_timeout().total_seconds())
        count = store.add(f"{prefix}/worlds/{rank}", 1)
        return cls(f"{prefix}/{count}", ranks, rank)

    def rendezvous(self, wanted: str = "compile its next collectives") -> Rendezvous:
        """Through which the ranks compare texts, or wait for each other to do what is `wanted`."""
        store, seconds = private.default_store(), world_timeout().total_seconds()
        own, world = AnsweringStore(dist.PrefixStore(self.prefix, store), seconds), AnsweringStore(store, seconds)
        return Rendezvous(own, self.prefix, self.ranks, self.rank, seconds, world, wanted)


_WeakGroup = weakref.ref[dist.ProcessGroup]


class _Alias(NamedTuple):
    """What a name stands for: `used` runs the collectives; its ranks, if they are processes, compare in `meeting`."""

    role: str
    used: _WeakGroup
    meeting: RankStore | None


# Weak references to groups: none stays alive, with its threads, after its world was destroyed.
aliases: dict[str, _Alias] = {}
"""Groups by the names under which graphs find them, as in torch's own registry: one for the process."""
made_groups: dict[tuple[str, tuple[int, ...]], _WeakGroup] = {}
"""Groups that were made here, by their purpose and ranks: one for all models and meshes of a world."""
GroupRole = Literal["shard", "replicate", "post_forward", "reduce"]


def _forget_gone_worlds() -> None:
    """Drops entries of worlds that were destroyed; their names may be used again."""
    for name in [name for name, known in aliases.items() if not _is_alive(known.used(), name)]:
        del aliases[name]
    for key in [key for key, made in made_groups.items() if not _is_alive(made())]:
        del made_groups[key]


def alias_of(group: dist.ProcessGroup, role: GroupRole) -> str:
    """The rank-independent name of `group`; names are numbered in the order of first use, alike on every rank.

    All ranks of the group must call this together: for gloo, and for "reduce" and "post_forward" groups, another group
    of the same ranks is made.
    """
    _forget_gone_worlds()
    are_processes = group.size() > 1 and _has_processes(group)
    if are_processes:
        remember_world()
    used = _used(group, role)
    for name, known in aliases.items():
        if known.used() is used and known.role == role:  # meshes of the same ranks share the name, too
            return name
    name = next(name for number in itertools.count() if (name := f"fsdp.{role}.{number}") not in aliases)
    private.register_group_alias(name, used)
    place = RankStore.of(name, tuple(dist.get_process_group_ranks(group))) if are_processes else None
    aliases[name] = _Alias(role, weakref.ref(used), place)
    return name


def _used(group: dist.ProcessGroup, role: GroupRole) -> dist.ProcessGroup:
    """The group that runs the collectives of a group in a role."""
    if group.size() == 1:
        return group
    ranks = tuple(dist.get_process_group_ranks(group))
    timeout = min(world_timeout(), private.timeout_of(group))
    # A world that was started without naming a backend says "undefined".
    if dist.get_backend(group) == "gloo" or str(dist.get_backend_config(group)) == "cpu:gloo":
        return _made_once(f"{role} on gloo", ranks, timeout, private.serial_gloo_group)
    # Collectives of one group wait for each other, so all-gathers would wait for reductions. FSDP2 makes a group of
    # post-forward shards for each call of `fully_shard`: in one group, gathers of several units do not share the link.
    return _made_once(role, ranks, timeout, private.new_group) if role in ("reduce", "post_forward") else group


def world_timeout() -> timedelta:
    """What the user gave the world: groups that torch makes of it have torch's own default, of 30 minutes on gloo."""
    world = dist.group.WORLD
    return dist.default_pg_timeout if world is None else private.timeout_of(world)


def _made_once(
    purpose: str,
    ranks: tuple[int, ...],
    timeout: timedelta,
    make: Callable[[Sequence[int], timedelta, str], dist.ProcessGroup],
) -> dist.ProcessGroup:
    """The group of some ranks for a purpose; they call this together if there is none in this world yet."""
    found = known() if (known := made_groups.get((purpose, ranks))) is not None else None
    if found is None or not _is_alive(found):
        # Making it waits inside of torch, where a rank would not hear that another one has failed.
        assert dist.group.WORLD is not None
        if _has_processes(dist.group.WORLD):
            RankStore.of(f"making {purpose}", ranks).rendezvous("make a process group").meet(0)
        found = make(ranks, timeout, f"fsdp_compile: {purpose}")
        made_groups[purpose, ranks] = weakref.ref(found)
    return found


def _is_alive(group: dist.ProcessGroup | None, name: str | None = None) -> bool:
    """Whether a group, known by its own name or an alias, was not destroyed, by itself or with its world."""
    return group is not None and private.resolve_group(name or group.group_name) is group


def comparing_group(place: RankStore) -> dist.ProcessGroup:
    """A group of some ranks that only compare in it: collectives of others may be in another order, or missing."""
    return _made_once("compare", place.ranks, world_timeout(), private.new_group)


def rank_store(name: str) -> RankStore | None:
    """Where the ranks of a named group meet; `None` for a group of one rank, or of ranks that are no processes."""
    alias = aliases.get(name)
    return alias.meeting if alias is not None and _is_alive(alias.used(), name) else None


def rank_stores() -> list[RankStore]:
    """Those of all groups of this rank."""
    return [place for name in aliases if (place := rank_store(name)) is not None]


def _has_processes(group: dist.ProcessGroup) -> bool:
    # `get_backend` says "undefined" of a world that was started without naming one; the configuration never does.
    return any(name in str(dist.get_backend_config(group)) for name in _REAL_BACKENDS)


def mesh_of_shape(device_type: str, shape: tuple[int, int]) -> DeviceMesh:
    """A mesh (replicate, shard) of the world, of groups that all models share. All ranks call this together."""
    _forget_gone_worlds()
    ranks = torch.arange(dist.get_world_size()).view(shape)
    row, column = divmod(dist.get_rank(), shape[1])
    lines = {"replicas": ranks[:, column], "shards": ranks[row]}
    groups = [_mesh_group(dim, tuple(line.tolist())) for dim, line in lines.items()]
    # A mesh holds its groups: one that was kept here would keep them, with their threads, when the world is gone.
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("dp_replicate", "fsdp"))


def replicas_only(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh (replicate, shard) of the ranks of a 1-D one, each of which has all of a parameter."""
    groups = [mesh.get_group(), _mesh_group("shards", (dist.get_rank(),))]
    ranks = mesh.mesh.view(-1, 1)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=("dp_replicate", "fsdp"))


def _mesh_group(dim: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world if len(ranks) == world.size() else _made_once(dim, ranks, world_timeout(), private.new_group)


def default_mesh(device_type: str) -> DeviceMesh:
    """A 1-D mesh over the whole world, started from torchrun's environment if need be; `ConfigError` without any."""
    if not dist.is_initialized():
        missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
        if missing:
            raise ConfigError(
                f"no process group is initialized, and torchrun's environment lacks {', '.join(missing)}",
                where="os.environ",
                instead="start the script with `torchrun --nproc-per-node N script.py`, or call "
                "torch.distributed.init_process_group() before the first step",
            )
        start_world(device_type)
    # Without names, as FSDP2's: DTensors on meshes with other names do not mix.
    return init_device_mesh(device_type, (dist.get_world_size(),))


def start_world(device_type: str, timeout: timedelta | None = None, **settings: Any) -> torch.device:
    """Starts the default process group, NCCL's for "cuda" or else gloo's; returns the device of this rank.

    NCCL takes the GPU of this local rank. `settings` are for `init_process_group`, instead of torchrun's environment.
    """
    if timeout is not None:
        settings["timeout"] = timeout
    if device_type != "cuda":
        dist.init_process_group("gloo", **settings)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    # Bound to the device: communicators are made now, and not by whichever collectives come first on each rank.
    dist.init_process_group("nccl", device_id=device, pg_options=private.high_priority("nccl", timeout), **settings)
    return device


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The ranks as one of them sees them. Every rank calls each of its collectives, with tensors on `device`."""

    rank: int
    size: int
    device: torch.device

    def any(self, value: torch.Tensor) -> bool:
        """Whether a 0-d tensor is true on any rank."""
        found = value.detach().int()
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, any picklable objects, in rank order."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]


@contextlib.contextmanager
def join_world(kind: DeviceKind, timeout_s: float = TIMEOUT_S) -> Iterator[World]:
    """Joins the process group that an elastic launcher's variables describe, and leaves it when all went well."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(torch_rendezvous("env://", timeout=timeout))
    store = private.store_of_this_start(store)  # or addresses of ranks that are gone would be read
    device = start_world(kind, timeout=timeout, store=store, rank=rank, world_size=size)
    yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    # Not after an error: other ranks would report lost connections before this one has reported its error.
    dist.destroy_process_group()


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises `ConfigError` for what is no mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"mesh is a {type(mesh).__name__}, not a DeviceMesh",
            where="fully_shard(mesh=...)",
            instead='init_device_mesh("cuda", (world_size,))',
        )
