"""What is gathered and how long it stays in memory.

nothing-unsharded-saved: backward gathers again what it needs, instead of having it saved.

unsharded-bytes: at no node is more gathered than the limits allow. With a budget in bytes, every byte from the start of
an all-gather to its reshard counts, and in backward every byte that forward saved because there is room, until its last
use. With a prefetch distance, a bucket may be live only while it is in use, while it is the next one needed, or as one
of that many gathered ahead. (How many are in use at once depends on the model: tied embeddings are in use from one end
to the other.) Buckets that are to be alone are gathered once those before them are freed. What the user has started
early comes on top. Units may share a collective only up to a number of bytes, since it is in memory from the first
one's need to the last one's use.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

import torch
from torch import fx

from fsdp_compile.ir.graph import Phase, Role, record_of, require, role_of
from fsdp_compile.layout.spec import Reshard, UnshardSpec, Update
from fsdp_compile.verify.facts import Facts, Kind, dtype_of, is_models, shape_of, size_bytes
from fsdp_compile.verify.report import Finding
from fsdp_compile.verify.trace_elements import WIRES, origin

_TOLD = ("aten", "prims", "_c10d_functional", "_dtensor", "fsdp_compile")
"""Namespaces whose random operators have torch's tag: torch's and this package's."""


def nothing_unsharded_saved(facts: Facts) -> Iterator[Finding]:
    """Finds saved values that backward could gather again, and backward results that keep gathered memory."""
    if facts.step.phase is Phase.BACKWARD:
        yield from _kept_by_backward(facts)
        return
    saved, derived = list(dict.fromkeys(facts.saved)), _derived(facts)
    for node in saved:
        if role_of(node) is Role.POST_FORWARD_SHARD and not _is_part(node):
            what = f"keeps {size_bytes(node):,} bytes of {', '.join(require(node).parameters)}"
            yield node, what, "a rank keeps its own 1/k of a parameter with reshard_after_forward=k, padding included"
    for node in saved:
        if node in derived and not _may_stay(node):
            what = f"saves {size_bytes(node):,} bytes for backward that come from {derived[node]} alone"
            yield node, what, "backward gathers again; to keep gathered parameters, set reshard_after_forward=False"


def _kept_by_backward(facts: Facts) -> Iterator[Finding]:
    """Gathered memory that leaves backward, and inputs that are recorded as saved by forward and cannot be."""
    for node in facts.step.output.all_input_nodes:
        if node in facts.memory:
            what = "leaves the backward graph, though its memory is gathered"
            yield node, what, "backward returns gradients, in memory of their own"
    for node in facts.of_role(Role.SAVED_PARAM):
        saved = [(spec.reshard, spec.shape, spec.param_dtype) for spec in require(node).specs]
        if saved != [(Reshard.AUTO, shape_of(node), dtype_of(node))]:
            what = f"is taken for {', '.join(require(node).parameters)}, which forward kept"
            yield node, what, 'the whole parameter, as it is read, with reshard_after_forward="auto"'


def _may_stay(node: fx.Node) -> bool:
    """Whether a node is a full parameter that `Reshard.AUTO` may leave unsharded, or what a collective has brought.

    Collectives of the program's own are not run again for backward.
    """
    if record_of(node) is None and getattr(node.target, "namespace", "") == "_c10d_functional":
        return True
    return role_of(node) is Role.FULL and all(spec.reshard is Reshard.AUTO for spec in require(node).specs)


def _is_part(node: fx.Node) -> bool:
    """Whether the ends of a post-forward shard come from the ends of its place in the gathered message, on any rank."""
    (spec,) = require(node).specs
    if spec.post_forward_size == 1 or shape_of(node) != (spec.post_forward_numel,):
        return False
    per_byte = WIRES[spec.gather_format].per_byte if spec.gather_format in WIRES else 1
    for own in range(spec.post_forward_size):
        for index in (0, spec.post_forward_numel - 1):
            sender, place = divmod(own * spec.post_forward_numel + index, spec.extent)
            place -= place % per_byte  # elements that share a byte are traced to the first of them
            found = origin(node, index, own)
            if found.node is None or role_of(found.node) is not Role.FLAT:
                return False
            if ([hop.rank for hop in found.hops], found.index) != ([sender], spec.offset + place):
                return False
    return True


def _derived(facts: Facts) -> dict[fx.Node, str]:
    """Values that are, share memory with, or follow from full parameters alone, and the first such parameter."""
    derived: dict[fx.Node, str] = {}
    for node in facts.nodes:
        record = record_of(node)
        if record is not None and record.role in (Role.GATHER_WAIT, Role.FULL, Role.COPY_OUT):
            dropped = [name for name, spec in zip(record.parameters, record.specs, strict=True) if _is_dropped(spec)]
            if dropped:
                derived[node] = dropped[0]
        # Saving a post-forward shard is what `reshard_after_forward=k` asks for.
        elif role_of(node) is not Role.POST_FORWARD_SHARD and _follows(node, derived):
            derived[node] = next(derived[source] for source in node.all_input_nodes if source in derived)
    return derived


def _is_dropped(spec: UnshardSpec) -> bool:
    # On a single rank a saved read is the flat parameter's own memory, which an update in backward would change.
    may_go = spec.size > 1 or spec.update is Update.IN_BACKWARD
    return may_go and spec.reshard is not Reshard.AFTER_BACKWARD


def _follows(node: fx.Node, derived: dict[fx.Node, str]) -> bool:
    """Whether a node depends on nothing but derived values."""
    # Random results depend on a state, too, and an operator of the user's may draw random numbers and not say it.
    is_told = node.target is getitem or getattr(node.target, "namespace", "") in _TOLD
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    inputs = node.all_input_nodes if node.op == "call_function" and is_told and not is_random else []
    tensors = [source for source in inputs if not isinstance(source.meta.get("val"), torch.SymInt)]
    return bool(tensors) and all(source in derived for source in tensors)


def unsharded_bytes(facts: Facts) -> list[Finding]:
    """Compares live gathered memory with the limits, at every node."""
    return [*_over_budget(facts), *_too_early(facts), *_not_alone(facts), *_too_late(facts), *_joined(facts)]


def _over_budget(facts: Facts) -> Iterator[Finding]:
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
                what = f"makes {sum(live.values()):,} bytes of gathered parameters live ({held})"
                yield node, what, f"the budget is {budget:,} bytes: start it later, or reshard others earlier"
        for ended in over.get(node, ()):
            live.pop(ended, None)


def _ends(facts: Facts) -> dict[fx.Node, list[fx.Node]]:
    """For each node after which gathered memory is freed, the gathers or saved parameters that it belonged to."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for gather, markers in facts.reshards.items():
        for marker in markers[:1]:
            found.setdefault(marker, []).append(gather)
    last = {saved: saved for saved in facts.of_role(Role.SAVED_PARAM)}
    for node, owners in facts.sharing({saved: frozenset([saved]) for saved in last}).items():
        for saved in owners:
            last[saved] = max([last[saved], *node.users], key=facts.order.__getitem__)
    for saved, end in last.items():
        found.setdefault(end, []).append(saved)
    return found


def _too_early(facts: Facts) -> Iterator[Finding]:
    """All-gathers that start while too many others are in flight."""
    if facts.limits.prefetch is None:
        return
    gathers = [gather for gather in facts.of_kind(Kind.GATHER) if gather.start not in facts.named]
    needed = {g.start: min((facts.order[w] for w in g.all_waits), default=len(facts.nodes)) for g in gathers}
    flying: list[fx.Node] = []
    for gather in gathers:
        flying = [g for g in flying if needed[g] > facts.order[gather.start]] + [gather.start]
        if len(flying) > facts.limits.prefetch + 1:
            what = f"starts while {len(flying) - 1} others are in flight: " + ", ".join(f"%{g}" for g in flying[:-1])
            hint = f"at most {facts.limits.prefetch} buckets are gathered ahead of the one that is needed next"
            yield gather.start, what, hint


def _not_alone(facts: Facts) -> Iterator[Finding]:
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
            what = f"starts while %{held[0]} is held, which is freed before it is needed"
            yield gather.start, what, "one bucket is held at once: start it after the reshard of the one before"


def _too_late(facts: Facts) -> Iterator[Finding]:
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
            what = f"keeps unit {unit} gathered during %{model}, which needs none of it"
            yield markers[0], what, f"reshard right after %{facts.nodes[last_use[gather]]}, the last use"


def _joined(facts: Facts) -> Iterator[Finding]:
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
                what = f"holds {held:,} bytes of {len(units)} units that share it ({', '.join(units)})"
                hint = f"units may share {limit:,} bytes: what they share is held while any of them needs it"
                yield collective.start, what, hint
