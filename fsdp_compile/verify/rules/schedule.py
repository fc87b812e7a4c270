"""When collectives start, are waited for, and are freed.

gather-waited: every message of a collective is waited for once, and not read before.

plan-order: collectives of one group are issued in an order that only the graph decides. Ranks compile the same text,
so any order in a graph is common to them. But a communicator runs its collectives one after the other, and an order
without a reason in the graph costs time or, when two passes disagree about it, may deadlock. Each kind has its reason:

    all-gathers       start in the order in which they are waited for, and in which their parameters are first read
    reduce-scatters   start in the order in which their gradients are ready, and are waited for in that order
    all-reduces       follow their reduce-scatters; those of parameters that are not sharded, their gradients

explicit-prefetch: an all-gather that a module was told to prefetch has the user's order instead, and starts where that
module's own parameters are complete.

no-use-after-reshard: gathered memory is freed once, and not used afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import getitem

from torch import fx

from fsdp_compile.ir.graph import Role, record_of, require, role_of
from fsdp_compile.verify.facts import WAIT, Collective, Facts, Kind, is_models
from fsdp_compile.verify.report import Finding


def gather_waited(facts: Facts) -> Iterator[Finding]:
    """Checks all-gathers, reduce-scatters and all-reduces alike."""
    for collective in facts.collectives:
        yield from _wrong_waits(collective)
    # Nodes before one of their inputs, where either is ours.
    for node, _ in facts.ours:
        for user in node.users:
            if facts.order[user] < facts.order[node]:
                yield user, f"stands before %{node}, whose result it uses", "start, wait, use"
        for source in node.all_input_nodes:
            if role_of(source) is None and facts.order[source] > facts.order[node]:
                yield node, f"stands before %{source}, whose result it uses", "start, wait, use"


def _wrong_waits(collective: Collective) -> Iterator[Finding]:
    kind = collective.kind.value
    early = [(u, collective.start) for u in collective.start.users if collective.is_grouped and u.target is not getitem]
    early += [(u, n) for nodes in collective.unfinished for n in nodes for u in n.users if u.target is not WAIT]
    for user, message in early:
        yield user, f"uses %{message} while its {kind} may still be running", "use the result of its wait_tensor"
    for index, waits in enumerate(collective.waits):
        if not waits:
            what = f"nobody waits for {f'message {index} of ' * collective.is_grouped}this {kind}"
            yield collective.start, what, "add one wait_tensor before the first use, or do not start it"
        for extra in waits[1:]:
            yield extra, f"%{waits[0]} waits for the same {kind} already", "let all readers use the first wait"


_ON_THE_WAY = {Role.REDUCE, Role.REDUCE_ITEM, Role.REDUCE_WAIT}


def plan_order(facts: Facts) -> Iterator[Finding]:
    """Compares neighbours, group by group and kind by kind."""
    groups: dict[tuple[Kind, str, bool], list[Collective]] = {}
    for collective in facts.collectives:
        if collective.start in facts.named:
            continue
        follows = any(role_of(node) in _ON_THE_WAY for node in collective.sent)
        groups.setdefault((collective.kind, str(collective.group), follows), []).append(collective)
    for (kind, _, _), members in groups.items():
        first_waits = [min((facts.order[wait] for wait in c.all_waits), default=None) for c in members]
        yield from _compare(members, first_waits, "is waited for")
        if kind is Kind.GATHER:
            readers = [[user for wait in c.all_waits for user in wait.users] for c in members]
            reads = [[facts.order[user] for user in users if role_of(user) is not Role.RESHARD] for users in readers]
            yield from _compare(members, [min(places, default=None) for places in reads], "is read")
        else:
            yield from _compare(members, [_ready(facts, c) for c in members], "has its gradients")


def _compare(members: Sequence[Collective], places: Sequence[int | None], verb: str) -> Iterator[Finding]:
    """Complains about each collective that starts after one whose place is later."""
    latest, latest_place = None, -1
    for collective, here in zip(members, places, strict=True):
        if here is None:
            continue
        if here < latest_place and latest is not None:
            hint = f"start {collective.kind.value}s of one group in the order in which each {verb}"
            yield collective.start, f"starts after %{latest.start}, but {verb} before it", hint
        else:
            latest, latest_place = collective, here


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


def explicit_prefetch(facts: Facts) -> Iterator[Finding]:
    """Checks each gather that a list names: after the wait that it follows, before anything is computed."""
    for gather, by in facts.named_by.items():
        unit, owner = require(gather).unit, require(by.start).unit
        after = max(facts.order[wait] for wait in by.all_waits)
        start = facts.order[gather]
        between = next((node for node in facts.nodes[after + 1 : start] if is_models(node)), None)
        if start < after or between is not None:
            early = "before its parameters have arrived" if start < after else f"after %{between}"
            what = f"gathers {unit}, which {owner} was told to prefetch, {early}"
            yield gather, what, f"start it right after the wait for {owner}"


def no_use_after_reshard(facts: Facts) -> Iterator[Finding]:
    """Checks that each all-gather has its reshard, and that no node uses its memory later."""
    leaving = {gather for node in facts.step.output.all_input_nodes for gather in facts.memory.get(node, ())}
    for gather in facts.of_kind(Kind.GATHER):
        markers = facts.reshards.get(gather.start, [])
        if not markers and gather.start not in leaving:
            what = f"unit {require(gather.start).unit} is never resharded"
            yield gather.start, what, "put one fsdp_compile.reshard of all its messages after their last use"
        for extra in markers[1:]:
            what = f"%{gather.start} is resharded by %{markers[0]} already"
            yield extra, what, "one fsdp_compile.reshard per all-gather"
        for marker in markers[:1]:
            forgotten = [wait for wait in gather.all_waits if wait not in marker.all_input_nodes]
            if forgotten:
                what = f"leaves message %{forgotten[0]} of %{gather.start} unsharded"
                yield marker, what, "a reshard frees all messages of its all-gather"
    for start, (marker, *_) in facts.reshards.items():
        uses = [(node, user) for node, owners in facts.memory.items() if start in owners for user in node.users]
        for node, user in uses:
            if facts.order[user] > facts.order[marker]:
                what = f"uses %{node}, memory of %{start}, after %{marker} freed it"
                yield user, what, "reshard after the last use, views included"
