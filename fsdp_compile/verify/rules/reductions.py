"""reduced-once: every gradient is averaged once over every rank that has a part of it, and lands in its own place."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fsdp_compile.ir.record import Role, require
from fsdp_compile.parameters.spec import ReadSpec
from fsdp_compile.verify.collective import Kind
from fsdp_compile.verify.complaint import Complaint
from fsdp_compile.verify.facts import Facts, dtype_of, shape_of
from fsdp_compile.verify.origin import Hop, Origin, origin
from fsdp_compile.verify.slots import Probe, Slot, all_slots, claims, probes, slots_of

RULE = "reduced-once"
_ONCE = "one reduce-scatter per parameter, then one all-reduce of the shard if there are replicas"


def reduced_once(facts: Facts) -> list[Complaint]:
    """Follows each element of each flat gradient back, and counts what is reduced."""
    complaints = list(_reduced_twice(facts))
    arrived: set[tuple[str, str]] = set()
    for gradient in facts.of_role(Role.FLAT_GRADIENT):
        complaints.extend(_wrong_output(facts, gradient))
        flat = _flat_of(facts, gradient)
        if flat is None or shape_of(flat) != shape_of(gradient) or dtype_of(flat) != dtype_of(gradient):
            complaints.append(_fits_no_flat(gradient))
            continue
        for slot in slots_of(flat):
            found = [(probe, origin(gradient, probe.place, probe.rank)) for probe in probes(slot.spec)]
            if any(o.node is not None for _, o in found):
                arrived.add((require(flat).unit, slot.name))
                complaints.extend(_wrong_elements(gradient, slot, found))
    return [*complaints, *_lost(facts, arrived)]


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
    places = [place for place, out in enumerate(facts.outputs) if out is gradient]
    if len(places) != 1:
        yield Complaint(
            RULE,
            gradient,
            f"is returned {len(places)} times",
            "each flat gradient is one output of the backward graph",
        )


def _flat_of(facts: Facts, gradient: fx.Node) -> fx.Node | None:
    """The flat shard whose gradient a node is: by its place among the outputs if that is described, else by record."""
    record = require(gradient)
    key = (record.unit, record.parameters, record.specs)
    flats = [f for f in facts.of_role(Role.FLAT) if (require(f).unit, require(f).parameters, require(f).specs) == key]
    notes = facts.step.output.meta.get("desc") or ()
    for out, note in zip(facts.outputs, notes, strict=False):
        if out is gradient and hasattr(note, "grad_of"):
            flats = [f for f in flats if f.meta.get("desc") == note.grad_of]
    return flats[0] if flats else None


def _fits_no_flat(gradient: fx.Node) -> Complaint:
    return Complaint(
        RULE,
        gradient,
        "is the gradient of no flat shard among the inputs, or not of its size and dtype",
        "record, output position, size and dtype of a flat gradient are those of its flat shard",
    )


def _wrong_elements(gradient: fx.Node, slot: Slot, found: list[tuple[Probe, Origin]]) -> Iterator[Complaint]:
    """Complains about the first element that is not the average of its own gradient."""
    for probe, source in found:
        node = source.hops[0].collective.start if source.hops else gradient
        if source.node is None or shape_of(source.node) != slot.spec.shape or source.index != probe.element:
            what = (
                f"puts element [{source.index}] of %{source.node} where the gradient of {slot.name} has "
                f"element [{probe.element}]"
            )
            hint = f"rank {probe.rank} holds it at [{probe.place}] of its flat shard"
        elif slot.name not in require(source.last).parameters:
            what = f"puts %{source.node}, a gradient of {require(source.last).parameters[0]}, where {slot.name} lies"
            hint = "messages, and slots in a message, keep their order"
        elif wrong := _wrong_hops(source.hops, slot.spec):
            what, hint = f"the gradient of {slot.name} {wrong}", _wanted(slot.spec)
        else:
            continue
        yield Complaint(RULE, node, what, hint)
        return


def _wrong_hops(hops: tuple[Hop, ...], spec: ReadSpec) -> str:
    wanted = _wanted_hops(spec)
    if [hop.collective.kind for hop in hops] != [kind for kind, _, _ in wanted]:
        went = " after ".join(hop.collective.kind.value for hop in hops) or "no collective"
        return f"went through {went}"
    for hop, (_, group, size) in zip(hops, wanted, strict=True):
        c = hop.collective
        if (c.reduction, c.group) != ("avg", group) or c.size not in (None, size):
            ranks = "" if c.size is None else f"{c.size} ranks of "
            return f"is combined by {c.reduction!r} over {ranks}{c.group!r}"
        if dtype_of(c.sent[0]) != spec.reduce_dtype:
            return f"is reduced as {dtype_of(c.sent[0])}"
    return ""


def _wanted_hops(spec: ReadSpec) -> list[tuple[Kind, str, int]]:
    """Kind, group and size of the collectives, the last one first."""
    replicate = [(Kind.REPLICATE, spec.replicate_group, spec.replicas)] * (spec.replicas > 1)
    return replicate + [(Kind.REDUCE, spec.group, spec.size)] * (spec.size > 1)


def _wanted(spec: ReadSpec) -> str:
    steps = [f"{kind.value} over {size} ranks of {group!r}" for kind, group, size in reversed(_wanted_hops(spec))]
    return f"average, in {spec.reduce_dtype}: " + (", then ".join(steps) or "no collective in a world of one rank")


def _lost(facts: Facts, arrived: set[tuple[str, str]]) -> Iterator[Complaint]:
    """Gradients that were made but are in no flat gradient."""
    makers: dict[tuple[str, str], fx.Node] = {}
    for node in facts.of_role(Role.GRADIENT, Role.REDUCE, Role.REPLICATE):
        record = require(node)
        makers |= {
            (record.unit, name): node
            for name, spec in zip(record.parameters, record.specs, strict=True)
            if 0 not in spec.shape
        }
    for (unit, name), node in makers.items():
        if (unit, name) not in arrived:
            yield Complaint(
                RULE,
                node,
                f"the gradient of {name} is made but reaches no output",
                "its reduced shard belongs into the flat gradient, at the parameter's offset",
            )
