"""What happens to gradients.

reduced-once: every gradient is averaged once over all ranks that have a part of it, and is put in its own place.

updated-last: an update in backward takes its gradient once, and nothing reads its flat parameter afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

import torch
from torch import fx

from fsdp_compile.ir.graph import GRADIENTS, MADE, Phase, Record, Role, require, role_of
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, Update
from fsdp_compile.verify.facts import NOTHING, WAIT, Facts, Kind, dtype_of, is_models, shape_of
from fsdp_compile.verify.report import Finding
from fsdp_compile.verify.trace_elements import Origin, Probe, Slot, all_slots, origin, probes, slots_of

_ONCE = "one reduce-scatter per parameter, then one all-reduce of the shard if there are replicas"


def reduced_once(facts: Facts) -> Iterator[Finding]:
    """Follows each element of each flat parameter's gradient back, and counts what is reduced."""
    yield from _reduced_twice(facts)
    arrived: set[tuple[str, str]] = set()
    for gradient in facts.of_role(*GRADIENTS):
        places = sum(out is gradient for out in facts.outputs)
        taken = sum(role_of(user) is Role.UPDATE for user in gradient.users)
        if places + taken != 1:
            what = f"is returned {places} times" + f" and taken by {taken} updates" * bool(taken)
            yield gradient, what, "each flat gradient is one output of the backward graph, or taken by one update"
        flat, held = _flat_of(facts, gradient), role_of(gradient) is Role.UNREDUCED_GRADIENT
        if flat is None or not _fits(gradient, flat):
            what = "is the gradient of no flat parameter among the inputs, or not of its size and dtype"
            hint = "record, output position, size and dtype of a flat gradient are those of its flat parameter"
            yield gradient, what, hint
            continue
        # Unreduced gradients are those of the whole shard group, rank after rank.
        rows = shape_of(flat)[0] if held else 0
        inputs = (n for n in facts.of_role(Role.UNREDUCED_GRAD, Role.PARTIAL_GRAD) if n.op == "placeholder")
        waiting = frozenset(require(node).role for node in inputs if _owns(require(node), require(flat)))
        for slot in slots_of(flat):
            found = [
                (probe, origin(gradient, probe.place + probe.rank * rows, 0 if held else probe.rank))
                for probe in probes(slot.spec)
            ]
            if any(o.node is not None for _, o in found):
                arrived.add((require(flat).unit, slot.name))
                yield from _wrong_elements(gradient, slot, found, waiting)
    yield from _lost(facts, arrived)


def _fits(gradient: fx.Node, flat: fx.Node) -> bool:
    """Whether a gradient has the size and dtype of the leaf that it goes to."""
    spec, role = require(flat).specs[0], role_of(gradient)
    parts = spec.size if role is Role.UNREDUCED_GRADIENT else 1
    unreduced = spec.unrounded_dtype if role is Role.UNREDUCED_GRADIENT else spec.unreduced_dtype
    dtype = dtype_of(flat) if role is Role.FLAT_GRADIENT else unreduced
    return shape_of(gradient) == (shape_of(flat)[0] * parts,) and dtype_of(gradient) == dtype


def _reduced_twice(facts: Facts) -> Iterator[Finding]:
    slots = all_slots(facts)
    for kind in (Kind.REDUCE, Kind.REPLICATE):
        seen: dict[tuple[str, str], list[fx.Node]] = {}
        for collective in facts.of_kind(kind):
            for key in require(collective.start).claims:
                before = seen.setdefault(key, [])
                before.append(collective.start)
                if len(before) > len(slots.get(key, ())):
                    what = f"reduces the gradient of {key[1]}, which %{before[0]} reduces already"
                    yield collective.start, what, f"sum the gradients of all reads first; {_ONCE}"


def _flat_of(facts: Facts, gradient: fx.Node) -> fx.Node | None:
    """The flat parameter whose gradient a node is: by its place among the outputs if described, else by record."""
    record = require(gradient)
    owner = Role.FLAT if record.role is Role.FLAT_GRADIENT else Role.GRAD_ACCUMULATOR
    leaves = [leaf for leaf in facts.of_role(owner) if _owns(require(leaf), record)]
    flats = [flat for flat in facts.of_role(Role.FLAT) if _owns(require(flat), record)]
    notes = facts.step.output.meta.get("desc") or ()
    for out, note in zip(facts.outputs, notes, strict=False):
        if out is gradient and hasattr(note, "grad_of"):
            if owner is Role.FLAT:
                flats = [flat for flat in flats if flat.meta.get("desc") == note.grad_of]
            elif leaves and all(leaf.meta.get("desc") != note.grad_of for leaf in leaves):
                return None
    return flats[0] if flats else None


def _owns(flat: Record, gradient: Record) -> bool:
    if (flat.unit, flat.parameters) != (gradient.unit, gradient.parameters):
        return False
    return [spec.offset for spec in flat.specs] == [spec.offset for spec in gradient.specs]


def _wrong_elements(
    gradient: fx.Node, slot: Slot, found: list[tuple[Probe, Origin]], waiting: frozenset[Role]
) -> Iterator[Finding]:
    """Complains about the first element that is not the average of its own gradient, `waiting` ones included."""
    for probe, source in found:
        if _is_own_row(source, slot, probe):
            continue
        node = source.hops[0].collective.start if source.hops else gradient
        if source.node is None or shape_of(source.node) != slot.spec.shape or source.index != probe.element:
            what = (
                f"puts element [{source.index}] of %{source.node} where the gradient of {slot.name} has "
                f"element [{probe.element}]"
            )
            hint = f"rank {probe.rank} holds it at [{probe.place}] of its flat parameter"
        elif slot.name not in require(source.last).parameters:
            what = f"puts %{source.node}, a gradient of {require(source.last).parameters[0]}, where {slot.name} lies"
            hint = "messages, and slots in a message, keep their order"
        elif wrong := _wrong_hops(source, slot.spec) or _wrong_addends(source, slot, probe, waiting):
            hops = reversed(_wanted_hops(slot.spec))
            steps = ", then ".join(f"{kind.value} over {size} ranks of {group!r}" for kind, group, size, _ in hops)
            what = f"the gradient of {slot.name} {wrong}"
            hint = f"average, in {slot.spec.reduce_dtype}: {steps or 'no collective in a world of one rank'}"
        else:
            continue
        yield node, what, hint
        return


def _is_own_row(source: Origin, slot: Slot, probe: Probe) -> bool:
    """Whether an element is from the averaged rows of a looked-up parameter."""
    if source.node is None or role_of(source.node) is not Role.AVERAGE_ROWS:
        return False
    here = slot.spec.text in source.node.args and require(source.node).parameters == (slot.name,)
    return here and not source.hops and source.index == probe.place - slot.spec.offset


def _wrong_hops(source: Origin, spec: UnshardSpec) -> str:
    hops, wanted = source.hops, _wanted_hops(spec)
    if [hop.collective.kind for hop in hops] != [kind for kind, *_ in wanted]:
        went = " after ".join(hop.collective.kind.value for hop in hops) or "no collective"
        return f"went through {went}"
    divisor = _wanted_divisor(spec)
    for hop, (_, group, size, operation) in zip(hops, wanted, strict=True):
        c = hop.collective
        if (c.reduction, c.group) != (operation, group) or c.size not in (None, size):
            ranks = "" if c.size is None else f"{c.size} ranks of "
            return f"is combined by {c.reduction!r} over {ranks}{c.group!r}"
        if dtype_of(c.sent[0]) != spec.reduce_dtype:
            return f"is reduced as {dtype_of(c.sent[0])}"
    if divisor is not None and source.divisor != divisor:
        return f"is divided by {source.divisor:g}"
    return ""


def _wanted_operation(spec: UnshardSpec) -> str:
    averages = spec.divide is None and spec.reduce_dtype is not torch.float16
    return "avg" if averages or spec.hook else "sum"


def _wanted_divisor(spec: UnshardSpec) -> float | None:
    """The product of divisions by nodes of their own; `None` if only a part of them is in this graph."""
    if spec.grad_placement is GradPlacement.UNREDUCED or _wanted_operation(spec) == "avg":
        return 1.0
    if spec.grad_placement is GradPlacement.REDUCE_SCATTERED:
        return None
    return float(spec.size * spec.replicas) if spec.divide is None else spec.divide


def _wrong_addends(source: Origin, slot: Slot, probe: Probe, waiting: frozenset[Role]) -> str:
    """What is wrong with the unreduced gradients that an element was added to; empty if nothing is."""
    owner, numel = require(slot.flat), shape_of(slot.flat)[0]
    wanted = {
        Role.UNREDUCED_GRAD: (probe.place + probe.rank * numel, len(source.hops)),
        Role.PARTIAL_GRAD: (probe.place, 1),
    }
    added = []
    for addend in source.addends:
        found = origin(addend.node, addend.index, 0)
        role = None if found.node is None else role_of(found.node)
        if found.node is None or role not in wanted or not _owns(require(found.node), owner):
            return f"is added to %{found.node}, which is no unreduced gradient of its flat parameter"
        index, hops = wanted[role]
        if found.index != index:
            return f"is added to [{found.index}] of the unreduced gradients, not to [{index}]"
        if addend.hops != hops:
            return f"is added to the {role.value} gradients at the wrong stage of its reduction"
        added.append(role)
    if len(added) != len(set(added)) or set(added) != waiting:
        return f"takes along {len(added)} of the {len(waiting)} unreduced gradients that wait for it"
    return ""


def _wanted_hops(spec: UnshardSpec) -> list[tuple[Kind, str, int, str]]:
    """Kind, group (or key of the hook), size and operation of the collectives, the last one first."""
    operation = _wanted_operation(spec)
    if spec.hook and spec.size == 1:
        return [(Kind.REPLICATE, spec.hook, 1, "hook")] * (spec.grad_placement is GradPlacement.REDUCED)
    replicate = [(Kind.REPLICATE, spec.replicate_group, spec.replicas, operation)]
    scatter = [(Kind.REDUCE, spec.hook or spec.scatter_group, spec.size, "hook" if spec.hook else operation)]
    return replicate * (spec.replicas > 1 and spec.grad_placement is GradPlacement.REDUCED) + scatter * (
        spec.size > 1 and spec.grad_placement is not GradPlacement.UNREDUCED
    )


def _lost(facts: Facts, arrived: set[tuple[str, str]]) -> Iterator[Finding]:
    """Gradients that were made but are in no flat gradient."""
    makers: dict[tuple[str, str], fx.Node] = {}
    for node in facts.of_role(*MADE, Role.REDUCE, Role.REPLICATE):
        record = require(node)
        made = zip(record.claims, record.specs, strict=True)
        makers |= {claim: node for claim, spec in made if 0 not in spec.shape}
    for (unit, name), node in makers.items():
        if (unit, name) not in arrived:
            what = f"the gradient of {name} is made but reaches no output"
            yield node, what, "its reduced shard belongs into the flat gradient, at the parameter's offset"


def updated_last(facts: Facts) -> Iterator[Finding]:
    """Checks each update, and that none is missing, repeated or without effect."""
    updated: dict[fx.Node, fx.Node] = {}
    updates = facts.of_role(Role.UPDATE)
    memory = _flat_memory(facts) if updates else {}
    for update in updates:
        flat, gradient = update.args[:2]
        assert isinstance(flat, fx.Node)
        assert isinstance(gradient, fx.Node)
        yield from _wrong_arguments(facts, update, flat, gradient)
        if flat in updated:
            what = f"updates what %{updated[flat]} updates already"
            yield update, what, "one update of a flat parameter per graph"
        updated.setdefault(flat, update)
        yield from _read_late(facts, memory, update, flat)
    # Gradients that leave the graph, or are unused, although an update in the graph was asked for.
    for gradient in facts.of_role(Role.FLAT_GRADIENT):
        record = require(gradient)
        taken = any(role_of(user) is Role.UPDATE for user in gradient.users)
        if _asks_for_it(record) and not record.specs[0].compute and not taken:
            what = "leaves the graph, and is not freed by an update in it"
            yield gradient, what, "one fsdp_compile.update of its flat parameter right after it"


def _wrong_arguments(facts: Facts, update: fx.Node, flat: fx.Node, gradient: fx.Node) -> Iterator[Finding]:
    if role_of(flat) is not Role.FLAT or not _asks_for_it(require(flat)):
        what = f"updates %{flat}, which is no flat parameter that is updated in backward"
        yield update, what, "a flat parameter's specs say when it is updated"
    elif role_of(gradient) is not Role.FLAT_GRADIENT or require(flat).claims != require(gradient).claims:
        what = f"updates %{flat} with %{gradient}, which is not its gradient"
        yield update, what, "the gradient of the same flat parameter, summed over all ranks"
    else:
        made = {claim for node in facts.of_role(*MADE) for claim in require(node).claims}
        record = require(gradient)
        claims = zip(record.claims, record.specs, strict=True)
        wanted = sorted(spec.offset for claim, spec in claims if claim in made)
        if list(update.args[2]) != wanted:  # type: ignore[arg-type]
            what = f"updates slots {list(update.args[2])}"  # type: ignore[arg-type]
            yield update, what, f"the slots that get gradients in this graph: {wanted}"
    if facts.step.phase is Phase.FORWARD:
        yield update, "updates parameters in forward", "gradients are made in backward"


def _flat_memory(facts: Facts) -> dict[fx.Node, frozenset[fx.Node]]:
    """The flat parameters whose memory a node's result shares, or that a collective still sends."""
    found = facts.sharing({flat: frozenset([flat]) for flat in facts.of_role(Role.FLAT)})
    for gather in facts.of_kind(Kind.GATHER):
        sent = NOTHING.union(*(found.get(message, NOTHING) for message in gather.sent))
        if sent:  # until the wait, the gather reads its input
            found.update(dict.fromkeys((gather.start, *(n for nodes in gather.unfinished for n in nodes)), sent))
    for start in facts.nodes:
        is_own = is_models(start) and getattr(start.target, "namespace", "") == "_c10d_functional"
        if not is_own or start.target is WAIT:
            continue
        sent = NOTHING.union(*(found.get(message, NOTHING) for message in start.all_input_nodes))
        items = [user for user in start.users if user.target is getitem]
        found.update(dict.fromkeys((start, *items), sent))
    return found


def _read_late(
    facts: Facts, memory: dict[fx.Node, frozenset[fx.Node]], update: fx.Node, flat: fx.Node
) -> Iterator[Finding]:
    for node, held in memory.items():
        if flat not in held:
            continue
        for user in node.users:
            if role_of(user) is not Role.UPDATE and facts.order[user] > facts.order[update]:
                what = f"reads %{node}, memory of %{flat}, after %{update} updated it"
                if user is facts.step.output:
                    what = f"returns %{node}, memory of %{flat}, which %{update} updates"
                yield user, what, "an update comes after all that reads its flat parameter"


def _asks_for_it(record: Record) -> bool:
    return record.specs[0].update is Update.IN_BACKWARD
