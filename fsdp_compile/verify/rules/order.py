"""plan-order: collectives of one group are issued in an order that the graph alone decides.

Ranks compile the same text, so any order in a graph is common to them. But a communicator runs its collectives one
after the other, and an order without a reason in the graph costs time or, when two passes disagree about it, may
deadlock. Each kind has its reason:

    all-gathers       start in the order in which they are waited for, and in which their parameters are first read
    reduce-scatters   start in the order in which their gradients are ready, and are waited for in that order
    all-reduces       follow their reduce-scatters; those of parameters that are not sharded, their gradients

All-gathers that a module was told to prefetch have the user's order instead (`explicit-prefetch`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fsdp_compile.ir.graph import Role, record_of, role_of
from fsdp_compile.verify.collective import Collective, Kind
from fsdp_compile.verify.facts import Facts
from fsdp_compile.verify.report import Complaint

RULE = "plan-order"
_ON_THE_WAY = {Role.REDUCE, Role.REDUCE_ITEM, Role.REDUCE_WAIT}


def plan_order(facts: Facts) -> list[Complaint]:
    """Compares neighbours, group by group and kind by kind."""
    groups: dict[tuple[Kind, str, bool], list[Collective]] = {}
    for collective in facts.collectives:
        if collective.start in facts.named:
            continue
        follows = any(role_of(node) in _ON_THE_WAY for node in collective.sent)
        groups.setdefault((collective.kind, str(collective.group), follows), []).append(collective)
    complaints = []
    for (kind, _, _), members in groups.items():
        complaints += _compare(facts, members, _first_wait, "is waited for")
        if kind is Kind.GATHER:
            complaints += _compare(facts, members, _first_read, "is read")
        else:
            complaints += _compare(facts, members, _ready, "has its gradients")
    return complaints


def _compare(
    facts: Facts, members: list[Collective], place: Callable[[Facts, Collective], int | None], verb: str
) -> list[Complaint]:
    """Complains about each collective that starts after one that comes later at `place`."""
    complaints = []
    latest, latest_place = None, -1
    for collective in members:
        here = place(facts, collective)
        if here is None:
            continue
        if here < latest_place and latest is not None:
            complaints.append(
                Complaint(
                    RULE,
                    collective.start,
                    f"starts after %{latest.start}, but {verb} before it",
                    f"start {collective.kind.value}s of one group in the order in which each {verb}",
                )
            )
        else:
            latest, latest_place = collective, here
    return complaints


def _first_wait(facts: Facts, collective: Collective) -> int | None:
    return min((facts.order[wait] for wait in collective.all_waits), default=None)


def _first_read(facts: Facts, collective: Collective) -> int | None:
    readers = (user for wait in collective.all_waits for user in wait.users if role_of(user) is not Role.RESHARD)
    return min((facts.order[reader] for reader in readers), default=None)


def _ready(facts: Facts, collective: Collective) -> int | None:
    """Position of the last node that makes a gradient of one parameter."""
    latest = None
    seen: set[fx.Node] = set()
    todo = list(collective.sent)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        record = record_of(node)
        # Packing nodes move with the collective, so they do not tell when a gradient was ready.
        packs = record is not None and record.role is Role.GRADIENT and len(record.parameters) > 1
        if packs or role_of(node) in _ON_THE_WAY:
            todo.extend(node.all_input_nodes)
        else:
            latest = max(facts.order[node], -1 if latest is None else latest)
    return latest
