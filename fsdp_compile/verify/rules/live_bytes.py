"""unsharded-bytes: at no node is more gathered than the limits allow.

With a budget in bytes, every byte from the start of an all-gather to its reshard counts, and in backward every byte
that forward saved because there is room, until its last use. With a prefetch distance, a bucket may be live only while
it is in use, while it is the next one needed, or as one of that many gathered ahead. (How many are in use at once
depends on the model: tied embeddings are in use from one end to the other.) Buckets that are to be alone are gathered
once those before them are freed. What the user has started early comes on top. Units may share a collective only up to
a number of bytes, since it is in memory from the first one's need to the last one's use.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fsdp_compile.ir.graph import Role, require, role_of
from fsdp_compile.verify.collective import Kind
from fsdp_compile.verify.facts import Facts, is_models, memory_sources, size_bytes
from fsdp_compile.verify.report import Complaint

RULE = "unsharded-bytes"


def unsharded_bytes(facts: Facts) -> list[Complaint]:
    """Compares live gathered memory with the limits, at every node."""
    return [*_over_budget(facts), *_too_early(facts), *_not_alone(facts), *_too_late(facts), *_joined(facts)]


def _over_budget(facts: Facts) -> Iterator[Complaint]:
    budget = facts.limits.unsharded_bytes
    if budget is None:
        return
    over = _ends(facts)
    starts = {gather.start: gather for gather in facts.of_kind(Kind.GATHER)}
    live = {node: size_bytes(node) for node in facts.of_role(Role.SAVED_PARAM)}
    for node in facts.nodes:
        if node in starts and node not in facts.named:
            live[node] = sum(size_bytes(message) for nodes in starts[node].unfinished for message in nodes[:1])
            if sum(live.values()) > budget:
                held = ", ".join(f"{require(g).unit} {n:,}" for g, n in live.items())
                yield Complaint(
                    RULE,
                    node,
                    f"makes {sum(live.values()):,} bytes of gathered parameters live ({held})",
                    f"the budget is {budget:,} bytes: start it later, or reshard others earlier",
                )
        for ended in over.get(node, ()):
            live.pop(ended, None)


def _ends(facts: Facts) -> dict[fx.Node, list[fx.Node]]:
    """For each node after which gathered memory is freed, the gathers or saved parameters that it belonged to."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for gather, markers in facts.reshards.items():
        for marker in markers[:1]:
            found.setdefault(marker, []).append(gather)
    for saved in facts.of_role(Role.SAVED_PARAM):
        found.setdefault(max(_users_of(saved), key=facts.order.__getitem__, default=saved), []).append(saved)
    return found


def _users_of(saved: fx.Node) -> Iterator[fx.Node]:
    """Nodes that read a saved parameter or a view of it."""
    seen, todo = {saved}, [saved]
    while todo:
        shared = todo.pop()
        yield from shared.users
        views = {user for user in shared.users if shared in memory_sources(user)} - seen
        seen |= views
        todo.extend(views)


def _too_early(facts: Facts) -> Iterator[Complaint]:
    """All-gathers that start while too many others are in flight."""
    if facts.limits.prefetch is None:
        return
    gathers = [gather for gather in facts.of_kind(Kind.GATHER) if gather.start not in facts.named]
    needed = {g.start: min((facts.order[w] for w in g.all_waits), default=len(facts.nodes)) for g in gathers}
    flying: list[fx.Node] = []
    for gather in gathers:
        flying = [g for g in flying if needed[g] > facts.order[gather.start]] + [gather.start]
        if len(flying) > facts.limits.prefetch + 1:
            yield Complaint(
                RULE,
                gather.start,
                f"starts while {len(flying) - 1} others are in flight: " + ", ".join(f"%{g}" for g in flying[:-1]),
                f"at most {facts.limits.prefetch} buckets are gathered ahead of the one that is needed next",
            )


def _not_alone(facts: Facts) -> Iterator[Complaint]:
    """All-gathers that start ahead while a bucket is live that is freed before they are needed."""
    if not facts.limits.alone:
        return
    freed = {gather: facts.order[markers[0]] for gather, markers in facts.reshards.items()}
    before: list[fx.Node] = []
    for gather in facts.of_kind(Kind.GATHER):
        needed = min((facts.order[wait] for wait in gather.all_waits), default=len(facts.nodes))
        held = [g for g in before if facts.order[gather.start] < freed.get(g, len(facts.nodes)) < needed]
        if gather.start in facts.named:
            continue
        before.append(gather.start)
        if held:
            yield Complaint(
                RULE,
                gather.start,
                f"starts while %{held[0]} is held, which is freed before it is needed",
                "one bucket is held at once: start it after the reshard of the one before",
            )


def _too_late(facts: Facts) -> Iterator[Complaint]:
    """Reshards that stand behind computation which no longer reads what they free."""
    if facts.limits.prefetch is None:
        return
    last_use: dict[fx.Node, int] = {}
    for node, owners in facts.memory.items():
        uses = [facts.order[user] for user in node.users if role_of(user) is not Role.RESHARD]
        for gather in owners:
            last_use[gather] = max([last_use.get(gather, 0), facts.order[node], *uses])
    for gather, markers in facts.reshards.items():
        between = facts.nodes[last_use[gather] + 1 : facts.order[markers[0]]]
        model = next((node for node in between if is_models(node)), None)
        if model is not None:
            unit = require(gather).unit
            yield Complaint(
                RULE,
                markers[0],
                f"keeps unit {unit} gathered during %{model}, which needs none of it",
                f"reshard right after %{facts.nodes[last_use[gather]]}, the last use",
            )


def _joined(facts: Facts) -> Iterator[Complaint]:
    """Collectives that several units share although they are too large for that."""
    limit = facts.limits.joined_bytes
    if limit is None:
        return
    for kind in Kind:
        for collective in facts.of_kind(kind):
            units = require(collective.start).units
            full = [nodes[0] for nodes in collective.unfinished if nodes] if kind is Kind.GATHER else collective.sent
            held = sum(map(size_bytes, full))
            if len(units) > 1 and held > limit:
                yield Complaint(
                    RULE,
                    collective.start,
                    f"holds {held:,} bytes of {len(units)} units that share it ({', '.join(units)})",
                    f"units may share {limit:,} bytes: what they share is held while any of them needs it",
                )
