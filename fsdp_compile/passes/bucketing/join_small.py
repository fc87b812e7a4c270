"""Lets neighbouring units share a collective if they are so small that its latency takes most of its time.

    40 gathers of 5 KB   ->   2 gathers of 100 KB

Unsharded parameters, and full gradients that wait for their reduction, grow by no more than the bytes given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

from torch import fx

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.queries import InputsByFlat
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.passes.bucketing.messages import ParamCollective, collective_of
from fsdp_compile.passes.bucketing.split_edges import LEAST_LATENCIES

Groups = list[list[ParamCollective]]


def worth_joining_bytes(hardware: Hardware, ranks: GroupRanks) -> int:
    """Bytes of a message below which it pays to send two as one, in a group of some ranks.

    A message of this size takes `LEAST_LATENCIES` times as long on the link as the latency of its collective.
    """
    waiting_us = hardware.collective_us(Kind.GATHER.value, 0, ranks)
    return round(LEAST_LATENCIES * waiting_us * hardware.bytes_per_s(ranks) / 1e6)


def join_gathers(groups: Groups, limit_bytes: int, partials: InputsByFlat) -> Groups:
    """Joins neighbours among groups of gathers, which are in the order in which they are needed."""
    return _joined(groups, limit_bytes, partials)


def join_reductions(groups: Groups, limit_bytes: int, order: dict[fx.Node, int], partials: InputsByFlat) -> Groups:
    """Joins neighbours among groups of reductions, in the order in which their last gradients are ready."""
    if limit_bytes == 0:
        return groups
    ordered = sorted(groups, key=lambda group: max(order[single.start] for single in group))
    return _joined(ordered, limit_bytes, partials)


@dataclasses.dataclass
class _Open:
    """A group that more can join, and its bytes."""

    singles: list[ParamCollective]
    size_bytes: int


def _joined(groups: Iterable[Sequence[ParamCollective]], limit_bytes: int, partials: InputsByFlat) -> Groups:
    """Groups with no large one between them, of one kind of collective, up to a limit; others are not joined."""
    done: Groups = []
    last: dict[Hashable, _Open] = {}
    for group in groups:
        size_bytes = sum(single.full_bytes for single in group)
        if size_bytes > limit_bytes:
            # Joining across it would gather units long before, or reduce them long after, their own time.
            last.clear()
        kinds = {_kind(single, partials) for single in group}
        kind = kinds.pop() if len(kinds) == 1 else None
        before = last.get(kind) if kind is not None else None
        if before is not None and before.size_bytes + size_bytes <= limit_bytes:
            before.singles.extend(group)
            before.size_bytes += size_bytes
            continue
        done.append(list(group))
        last[kind] = _Open(done[-1], size_bytes)
    return done


def _kind(single: ParamCollective, partials: InputsByFlat) -> Hashable:
    """Equal for parameters whose collectives can be joined beyond their unit; `None` for all others."""
    return (collective_of(single), single.spec.reshard) if can_be_joined(single, partials) else None


def can_be_joined(single: ParamCollective, partials: InputsByFlat) -> bool:
    """Whether a collective can be joined beyond its unit.

    A hook is called once for each unit. Post-forward shards and accumulated gradients belong to the flat parameters of
    one unit.
    """
    spec = single.spec
    return not (spec.hook or spec.post_forward_size > 1 or spec.compute or partials.of(single.flat) is not None)
