"""Times of collectives by message size, in the groups that a world of hosts has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from fsdp_compile._torch.distributed import resolve_group
from fsdp_compile.comm.groups import GroupRole, alias_of, default_mesh, mesh_of_shape
from fsdp_compile.cost.calibrated import KINDS
from fsdp_compile.cost.formulas import share_of_others
from fsdp_compile.cost.links import MeasuredCollective
from fsdp_compile.explain.measure import WARM_UP, median_us
from fsdp_compile.layout.hosts import GroupRanks, ranks_per_host

Agree = Callable[[float], float]
"""From a time of this rank to the longest of all ranks."""

ROUNDS: Final = 5
_GROWTH: Final = 8
_SIZES: Final = {"cpu": tuple(4096 * _GROWTH**n for n in range(6)), "cuda": tuple(4096 * _GROWTH**n for n in range(7))}
"""Bytes of whole messages: up to 128 MB through the host's memory, up to 1 GB on GPUs."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """This rank's group among groups of one kind, all of which send at once.

    Attributes:
        on_one_host: How many of its ranks share a host.
    """

    group: dist.ProcessGroup
    ranks: int
    on_one_host: int


def spreads(device_type: str) -> list[Spread]:
    """The kinds of groups that jobs have: the world, the ranks of a host, and one rank of each host.

    All ranks of the world call this together.
    """
    world = default_mesh(device_type)
    ranks = world.size()
    local = ranks_per_host() or ranks
    if ranks == 1:
        return []
    found = [_spread(world.get_group(), "shard", GroupRanks(ranks), local)]
    if 1 < local < ranks and ranks % local == 0:
        mesh = mesh_of_shape(device_type, (ranks // local, local))
        found.append(_spread(mesh.get_group("fsdp"), "shard", GroupRanks(local), local))
        found.append(_spread(mesh.get_group("dp_replicate"), "replicate", GroupRanks(ranks // local, local), local))
    return found


def _spread(group: dist.ProcessGroup, role: GroupRole, ranks: GroupRanks, local: int) -> Spread:
    used = resolve_group(alias_of(group, role))  # the one that runs the collectives of compiled graphs
    assert used is not None
    return Spread(used, ranks.size, ranks.on_one_host(local))


def measure_kind(kind: str, spread: Spread, device: torch.device, seconds: float, agree: Agree) -> MeasuredCollective:
    """Times of one kind of collective, as many sizes as there is time for, but two at least.

    All ranks of the world call this together, and get the same numbers.
    """
    points: list[tuple[float, float]] = []
    left_us = seconds * 1e6
    for size_bytes in _SIZES[device.type]:
        run, sent_bytes = _prepared(kind, size_bytes, spread, device)
        if points and sent_bytes <= points[-1][0]:
            continue  # so many ranks that no message is as small
        dist.barrier()
        time_us = agree(median_us(run, device, ROUNDS))
        # A larger message takes no less time, so that the rate between two is a positive one.
        points.append((sent_bytes, max(time_us, points[-1][1] if points else 0.0)))
        left_us -= time_us * (WARM_UP + ROUNDS)
        if len(points) > 1 and left_us < time_us * _GROWTH * (WARM_UP + ROUNDS):
            break
    return MeasuredCollective(kind, spread.ranks, tuple(points), spread.on_one_host)


def _prepared(kind: str, size_bytes: int, spread: Spread, device: torch.device) -> tuple[Callable[[], object], float]:
    """A collective of about `size_bytes` in all, and the bytes that each rank sends in it."""
    group, ranks = spread.group, spread.ranks
    part = torch.zeros(-(-size_bytes // (4 * ranks)), device=device)
    whole = torch.zeros(part.numel() * ranks, device=device)
    sent_bytes = 4 * whole.numel() * share_of_others(ranks)
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, part, group=group), sent_bytes),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole, group=group), sent_bytes),
        "all-reduce": (lambda: dist.all_reduce(whole, group=group), 2 * sent_bytes),
    }
    assert calls.keys() == set(KINDS)
    return calls[kind]
