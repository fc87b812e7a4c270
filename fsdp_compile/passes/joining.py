"""Units so small that a collective's latency takes most of its time: neighbours share one.

    40 gathers of 5 KB   ->   2 gathers of 100 KB

What is gathered at once, and what of full gradients waits for its reduction, grows by no more than the bytes given.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from torch import fx

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import Hardware
from fsdp_compile.ir.queries import beside
from fsdp_compile.ir.record import Role
from fsdp_compile.passes.edges import LEAST_LATENCIES
from fsdp_compile.passes.pieces import Single, collective_of

Groups = list[list[Single]]


def worth_joining_bytes(hardware: Hardware, ranks: int) -> int:
    """Bytes of a message below which it pays to send two as one.

    A message of this size takes `LEAST_LATENCIES` times as long on the link as the latency of its collective.

    Args:
        hardware: What connects the ranks.
        ranks: Ranks in the group.
    """
    link = hardware.link
    waiting_us = link.collective_us(Kind.GATHER.value, 0, ranks)
    return round(LEAST_LATENCIES * waiting_us * link.bytes_per_s / 1e6)


def join_gathers(groups: Groups, limit_bytes: int) -> Groups:
    """Joins neighbours among groups of gathers, which stand in the order in which they are needed."""
    return _joined(groups, limit_bytes)


def join_reductions(groups: Groups, limit_bytes: int, order: dict[fx.Node, int]) -> Groups:
    """Joins neighbours among groups of reductions, in the order in which their last gradients are ready."""
    if limit_bytes == 0:
        return groups
    return _joined(sorted(groups, key=lambda group: max(order[single.start] for single in group)), limit_bytes)


def _joined(groups: Iterable[Sequence[Single]], limit_bytes: int) -> Groups:
    """Groups with no large one between them, of one kind of collective, up to a limit; others stand alone."""
    done: Groups = []
    last: dict[Hashable, list[Single]] = {}
    for group in groups:
        if _full_bytes(group) > limit_bytes:
            last.clear()
        kinds = {_kind(single) for single in group}
        kind = kinds.pop() if len(kinds) == 1 else None
        before = last.get(kind) if kind is not None else None
        if before is not None and _full_bytes([*before, *group]) <= limit_bytes:
            before.extend(group)
            continue
        done.append(list(group))
        last[kind] = done[-1]
    return done


def _kind(single: Single) -> Hashable:
    """Equal for parameters whose collectives can be joined beyond their unit; `None` for those that stay with it.

    A hook is called once for each unit. Parts that are kept from forward, and gradients held from an earlier backward,
    belong to the flat shards of one unit.
    """
    spec = single.spec
    if spec.hook or spec.kept_over > 1 or spec.compute or beside(single.flat, Role.PARTIAL) is not None:
        return None
    return collective_of(single), spec.reshard


def _full_bytes(singles: Sequence[Single]) -> int:
    return sum(single.full_bytes for single in singles)
