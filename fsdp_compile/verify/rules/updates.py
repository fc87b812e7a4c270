"""updated-last: an update in backward takes its gradient once, and nothing reads its flat parameter afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

from torch import fx

from fsdp_compile.ir.graph import MADE, Phase, Record, Role, require, role_of
from fsdp_compile.layout.spec import Update
from fsdp_compile.verify.collective import WAIT, Kind
from fsdp_compile.verify.facts import Facts, is_models, memory_sources
from fsdp_compile.verify.report import Complaint

RULE = "updated-last"


def updated_last(facts: Facts) -> list[Complaint]:
    """Checks each update, and that none is missing, repeated or without effect."""
    complaints: list[Complaint] = []
    updated: dict[fx.Node, fx.Node] = {}
    updates = facts.of_role(Role.UPDATE)
    memory = _memory(facts) if updates else {}
    for update in updates:
        flat, gradient = update.args[:2]
        assert isinstance(flat, fx.Node)
        assert isinstance(gradient, fx.Node)
        complaints.extend(_wrong_arguments(facts, update, flat, gradient))
        if flat in updated:
            complaints.append(_again(update, updated[flat]))
        updated.setdefault(flat, update)
        complaints.extend(_read_late(facts, memory, update, flat))
    return [*complaints, *_never_updated(facts)]


def _wrong_arguments(facts: Facts, update: fx.Node, flat: fx.Node, gradient: fx.Node) -> Iterator[Complaint]:
    if role_of(flat) is not Role.FLAT or not _asks_for_it(require(flat)):
        what = f"updates %{flat}, which is no flat parameter that is updated in backward"
        yield Complaint(RULE, update, what, "a flat parameter's specs say when it is updated")
    elif role_of(gradient) is not Role.FLAT_GRADIENT or not _same(require(flat), require(gradient)):
        what = f"updates %{flat} with %{gradient}, which is not its gradient"
        yield Complaint(RULE, update, what, "the gradient of the same flat parameter, summed over all ranks")
    else:
        made = {claim for node in facts.of_role(*MADE) for claim in require(node).claims}
        record = require(gradient)
        claims = zip(record.claims, record.specs, strict=True)
        wanted = sorted(spec.offset for claim, spec in claims if claim in made)
        if list(update.args[2]) != wanted:  # type: ignore[arg-type]
            what = f"updates slots {list(update.args[2])}"  # type: ignore[arg-type]
            yield Complaint(RULE, update, what, f"the slots that get gradients in this graph: {wanted}")
    if facts.step.phase is Phase.FORWARD:
        yield Complaint(RULE, update, "updates parameters in forward", "gradients are made in backward")


def _again(update: fx.Node, before: fx.Node) -> Complaint:
    return Complaint(
        RULE, update, f"updates what %{before} updates already", "one update of a flat parameter per graph"
    )


def _memory(facts: Facts) -> dict[fx.Node, frozenset[fx.Node]]:
    """The flat parameters whose memory a node's result shares, or that a collective still sends."""
    nothing: frozenset[fx.Node] = frozenset()
    found = {flat: frozenset([flat]) for flat in facts.of_role(Role.FLAT)}
    for node in facts.nodes:
        shared = nothing.union(*(found.get(source, nothing) for source in memory_sources(node)))
        if shared:
            found[node] = found.get(node, nothing) | shared
    for gather in facts.of_kind(Kind.GATHER):
        sent = nothing.union(*(found.get(message, nothing) for message in gather.sent))
        if sent:  # until the wait, the gather reads its input
            found.update(dict.fromkeys((gather.start, *(n for nodes in gather.unfinished for n in nodes)), sent))
    for start in filter(_is_own_start, facts.nodes):
        sent = nothing.union(*(found.get(message, nothing) for message in start.all_input_nodes))
        items = [user for user in start.users if user.target is getitem]
        found.update(dict.fromkeys((start, *items), sent))
    return found


def _is_own_start(node: fx.Node) -> bool:
    """Whether a node starts a collective of the program's own."""
    return is_models(node) and node.target is not WAIT and getattr(node.target, "namespace", "") == "_c10d_functional"


def _read_late(
    facts: Facts, memory: dict[fx.Node, frozenset[fx.Node]], update: fx.Node, flat: fx.Node
) -> Iterator[Complaint]:
    for node, held in memory.items():
        if flat not in held:
            continue
        for user in node.users:
            if role_of(user) is not Role.UPDATE and facts.order[user] > facts.order[update]:
                what = f"reads %{node}, memory of %{flat}, after %{update} updated it"
                if user is facts.step.output:
                    what = f"returns %{node}, memory of %{flat}, which %{update} updates"
                yield Complaint(RULE, user, what, "an update comes after all that reads its flat parameter")


def _never_updated(facts: Facts) -> Iterator[Complaint]:
    """Gradients that leave the graph, or are unused, although an update in the graph was asked for."""
    for gradient in facts.of_role(Role.FLAT_GRADIENT):
        record = require(gradient)
        updates = [user for user in gradient.users if role_of(user) is Role.UPDATE]
        if _asks_for_it(record) and not record.specs[0].compute and not updates:
            what = "leaves the graph, and is not freed by an update in it"
            yield Complaint(RULE, gradient, what, "one fsdp_compile.update of its flat parameter right after it")


def _asks_for_it(record: Record) -> bool:
    return record.specs[0].update is Update.IN_BACKWARD


def _same(flat: Record, gradient: Record) -> bool:
    return (flat.unit, flat.parameters) == (gradient.unit, gradient.parameters)
