"""All ranks of a group must compile the same collectives: compared through the store, before any of them runs.

A rank that compiles alone must not wait for others: batches differ, so one rank may recompile for a size that the
others have not met. But whatever it compiles for its size, the collectives are those of the other ranks' graphs, or
the ranks would hang. So a rank speaks up only when it compiles an order of collectives that it has not compiled
before; the n-th such order has to be the same on every rank of a group.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import fx
from torch.utils._pytree import tree_leaves

from fsdp_compile import _torch
from fsdp_compile.errors import RankMismatchError
from fsdp_compile.ir.graph import StepGraph
from fsdp_compile.ir.record import Role, require

_STARTS = (Role.GATHER, Role.REDUCE, Role.REPLICATE)
_NAMES = re.compile(r"(?<= of )(.*)(?= \()")
"""The names of parameters in a line."""
_REAL_BACKENDS = ("gloo", "nccl", "xccl", "mpi")
"""Parts of the names of backends behind whose ranks there are processes."""


@dataclasses.dataclass
class _Group:
    """What this process has compiled for one group.

    Attributes:
        group: The group that its alias stood for.
        orders: Digests of the orders of collectives.
    """

    group: dist.ProcessGroup
    orders: set[str] = dataclasses.field(default_factory=set)


_groups: dict[str, _Group] = {}


def agree(step: StepGraph) -> None:
    """Compares the collectives of a transformed graph with those that the other ranks of their groups compile.

    Raises:
        RankMismatchError: On every rank of a group, if two of them differ, or if one never compiles as many.
    """
    starts = [node for node in step.graph.nodes if node.meta.get("fsdp") and require(node).role in _STARTS]
    for alias in dict.fromkeys(group_of(node) for node in starts):
        group = _torch.resolve_group(alias)
        if group is None or group.size() == 1 or not _has_processes(group):
            continue
        mine = [_line(node) for node in starts if group_of(node) == alias]
        known = _known(alias, group)
        digest = hashlib.sha256("\n".join(_numbered(mine)).encode()).hexdigest()
        if digest not in known.orders:
            known.orders.add(digest)
            prefix = f"fsdp_compile/{alias}/{_ranks(group)}/{len(known.orders)}"
            _compare(dist.PrefixStore(prefix, _torch.default_store()), group, digest, mine)


def group_of(node: fx.Node) -> str:
    """The alias of the group on which a collective runs: its only argument that is text and starts as aliases do."""
    return next(a for a in node.args if isinstance(a, str) and a.startswith("fsdp."))


def _has_processes(group: dist.ProcessGroup) -> bool:
    # `get_backend` says "undefined" of a world that was started without naming one; the configuration never does.
    return any(name in str(dist.get_backend_config(group)) for name in _REAL_BACKENDS)


def _ranks(group: dist.ProcessGroup) -> str:
    return hashlib.sha256(str(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]


def _known(alias: str, group: dist.ProcessGroup) -> _Group:
    known = _groups.get(alias)
    if known is None or known.group is not group:
        known = _groups[alias] = _Group(group)
    return known


def _line(node: fx.Node) -> str:
    record = require(node)
    messages = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    sizes = ", ".join(f"{v.numel()} {str(v.dtype).removeprefix('torch.')}" for v in messages)
    operator = str(node.target).removeprefix("_c10d_functional.").removesuffix(".default")
    return f"{record.phase.value}: {operator} of {', '.join(record.parameters)} ({sizes})"


def _numbered(lines: list[str]) -> list[str]:
    """The lines with each parameter as its place among those of the graph, in the order of their numbered names.

    Layers of one shape share a graph, which has the names of the layer that was called first: that may be another one
    on a rank that compiles again for its own batch. The order of layers within a graph is the same for all that share.
    """
    names = {name for line in lines for name in _names(line)}
    places = {name: str(i) for i, name in enumerate(sorted(names, key=_natural))}
    return [_NAMES.sub(lambda found: ", ".join(places[n] for n in found[1].split(", ")), line, 1) for line in lines]


def _names(line: str) -> list[str]:
    found = _NAMES.search(line)
    return found[1].split(", ") if found else []


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `experts.9` before `experts.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _compare(store: dist.Store, group: dist.ProcessGroup, digest: str, mine: list[str]) -> None:
    """One round: everyone compares with the group's first rank, and nobody goes on before all have."""
    rank, text = group.rank(), "\n".join(mine)
    try:
        if rank == 0:
            store.set("first", digest)
        elif store.get("first").decode() != digest:
            store.set(f"text/{rank}", text)
            store.set("differs", str(rank))
        if store.add("arrived", 1) == group.size():
            store.set("all", "")
        store.wait(["all"])
        if not store.check(["differs"]):
            _clean(store, group.size())
            return
        if rank == 0:
            store.set("text/0", text)
        other = int(store.get("differs"))
        first, second = (store.get(f"text/{r}").decode().splitlines() for r in (0, other))
    except RuntimeError as error:  # the store's timeout, which is that of the default process group
        raise RankMismatchError(
            f"not all {group.size()} ranks compile as many different orders of collectives as this one",
            where=f"rank {rank} of the group, at {mine[0]}",
            instead="the same control flow on every rank: what a rank reads must not depend on its data",
        ) from error
    raise _mismatch(dist.get_process_group_ranks(group), other, first, second)


def _clean(store: dist.Store, size: int) -> None:
    """The last one to leave deletes the round's keys: a later world of the same store counts rounds anew."""
    if store.add("left", 1) == size:
        for key in ("first", "arrived", "all", "left"):
            store.delete_key(key)


def _mismatch(ranks: list[int], other: int, first: list[str], second: list[str]) -> RankMismatchError:
    pairs = zip(_numbered(first), _numbered(second), strict=False)
    number = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return RankMismatchError(
        f"rank {ranks[0]} and rank {ranks[other]} compile different collectives",
        where=f"collective {number + 1}: {_at(first, number)} on rank {ranks[0]}, "
        f"{_at(second, number)} on rank {ranks[other]}",
        instead="the same control flow on every rank: which parameters are read, and in which order, must not depend "
        "on a rank's number or data",
    )


def _at(lines: Iterable[str], number: int) -> str:
    return next((f"[{line}]" for i, line in enumerate(lines) if i == number), "nothing more")
