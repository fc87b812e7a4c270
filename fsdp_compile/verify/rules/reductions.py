"""reduced-once: every gradient is averaged once over all ranks that have a part of it, and is put in its own place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fsdp_compile.ir.graph import GRADIENTS, MADE, Record, Role, require, role_of
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec
from fsdp_compile.verify.collective import Kind
from fsdp_compile.verify.facts import Facts, dtype_of, shape_of
from fsdp_compile.verify.report import Complaint
from fsdp_compile.verify.slots import Probe, Slot, all_slots, claims, probes, slots_of
from fsdp_compile.verify.trace_elements import Origin, origin

RULE = "reduced-once"
_ONCE = "one reduce-scatter per parameter, then one all-reduce of the shard if there are replicas"


def reduced_once(facts: Facts) -> list[Complaint]:
    """Follows each element of each flat parameter's gradient back, and counts what is reduced."""
    complaints = list(_reduced_twice(facts))
    arrived: set[tuple[str, str]] = set()
    for gradient in facts.of_role(*GRADIENTS):
        complaints.extend(_wrong_output(facts, gradient))
        flat, held = _flat_of(facts, gradient), role_of(gradient) is Role.UNREDUCED_GRADIENT
        if flat is None or not _fits(gradient, flat):
            complaints.append(_fits_no_flat(gradient))
            continue
        # Unreduced gradients are those of the whole shard group, rank after rank.
        rows = shape_of(flat)[0] if held else 0
        waiting = _waiting(facts, flat)
        for slot in slots_of(flat):
            places = [(probe, probe.place + probe.rank * rows) for probe in probes(slot.spec)]
            found = [(probe, origin(gradient, place, 0 if held else probe.rank)) for probe, place in places]
            if any(o.node is not None for _, o in found):
                arrived.add((require(flat).unit, slot.name))
                complaints.extend(_wrong_elements(gradient, slot, found, waiting))
    return [*complaints, *_lost(facts, arrived)]


def _fits(gradient: fx.Node, flat: fx.Node) -> bool:
    """Whether a gradient has the size and dtype of the leaf that it goes to."""
    spec, role = require(flat).specs[0], role_of(gradient)
    parts = spec.size if role is Role.UNREDUCED_GRADIENT else 1
    unreduced = spec.unrounded_dtype if role is Role.UNREDUCED_GRADIENT else spec.unreduced_dtype
    dtype = dtype_of(flat) if role is Role.FLAT_GRADIENT else unreduced
    return shape_of(gradient) == (shape_of(flat)[0] * parts,) and dtype_of(gradient) == dtype


def _reduced_twice(facts: Facts) -> Iterator[Complaint]:
    slots = all_slots(facts)
    for kind in (Kind.REDUCE, Kind.REPLICATE):
        seen: dict[tuple[str, str], list[fx.Node]] = {}
        for collective in facts.of_kind(kind):
            for key in claims(require(collective.start)):
                before = seen.setdefault(key, [])
                before.append(collective.start)
                if len(before) > len(slots.get(key, ())):
                    yield Complaint(
                        RULE,
                        collective.start,
                        f"reduces the gradient of {key[1]}, which %{before[0]} reduces already",
                        f"sum the gradients of all reads first; {_ONCE}",
                    )


def _wrong_output(facts: Facts, gradient: fx.Node) -> Iterator[Complaint]:
    places = sum(out is gradient for out in facts.outputs)
    taken = sum(role_of(user) is Role.UPDATE for user in gradient.users)
    if places + taken != 1:
        yield Complaint(
            RULE,
            gradient,
            f"is returned {places} times" + f" and taken by {taken} updates" * bool(taken),
            "each flat gradient is one output of the backward graph, or taken by one update",
        )


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


def _waiting(facts: Facts, flat: fx.Node) -> frozenset[Role]:
    """The kinds of unreduced gradients of a flat parameter that come into the graph."""
    owner = require(flat)
    inputs = (node for node in facts.of_role(Role.UNREDUCED_GRAD, Role.PARTIAL_GRAD) if node.op == "placeholder")
    return frozenset(require(node).role for node in inputs if _owns(require(node), owner))


def _fits_no_flat(gradient: fx.Node) -> Complaint:
    return Complaint(
        RULE,
        gradient,
        "is the gradient of no flat parameter among the inputs, or not of its size and dtype",
        "record, output position, size and dtype of a flat gradient are those of its flat parameter",
    )


def _wrong_elements(
    gradient: fx.Node, slot: Slot, found: list[tuple[Probe, Origin]], waiting: frozenset[Role]
) -> Iterator[Complaint]:
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
            what, hint = f"the gradient of {slot.name} {wrong}", _wanted(slot.spec)
        else:
            continue
        yield Complaint(RULE, node, what, hint)
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


def _wanted(spec: UnshardSpec) -> str:
    steps = [f"{kind.value} over {size} ranks of {group!r}" for kind, group, size, _ in reversed(_wanted_hops(spec))]
    return f"average, in {spec.reduce_dtype}: " + (", then ".join(steps) or "no collective in a world of one rank")


def _lost(facts: Facts, arrived: set[tuple[str, str]]) -> Iterator[Complaint]:
    """Gradients that were made but are in no flat gradient."""
    makers: dict[tuple[str, str], fx.Node] = {}
    for node in facts.of_role(*MADE, Role.REDUCE, Role.REPLICATE):
        record = require(node)
        made = zip(claims(record), record.specs, strict=True)
        makers |= {claim: node for claim, spec in made if 0 not in spec.shape}
    for (unit, name), node in makers.items():
        if (unit, name) not in arrived:
            yield Complaint(
                RULE,
                node,
                f"the gradient of {name} is made but reaches no output",
                "its reduced shard belongs into the flat gradient, at the parameter's offset",
            )
