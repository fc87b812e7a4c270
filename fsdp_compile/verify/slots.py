"""Slots of flat parameters, and where in them the elements of a full parameter are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import fx

from fsdp_compile.ir.graph import Record, Role, require
from fsdp_compile.layout.spec import UnshardSpec
from fsdp_compile.verify.facts import Facts
from fsdp_compile.verify.trace_elements import linear


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat parameter that is the graph input `flat`."""

    flat: fx.Node
    name: str
    spec: UnshardSpec


@dataclasses.dataclass(frozen=True)
class Probe:
    """One element of a full parameter, by row-major index, and its rank and index in that rank's flat parameter."""

    element: int
    rank: int
    place: int


def slots_of(flat: fx.Node) -> list[Slot]:
    """All slots of a flat parameter."""
    record = require(flat)
    return [Slot(flat, name, spec) for name, spec in zip(record.parameters, record.specs, strict=True)]


def all_slots(facts: Facts) -> dict[tuple[str, str], list[Slot]]:
    """Slots by unit and name of the parameter; more than one where two models of one class meet in a graph."""
    found: dict[tuple[str, str], list[Slot]] = {}
    for flat in facts.of_role(Role.FLAT):
        for slot in slots_of(flat):
            found.setdefault((require(flat).unit, slot.name), []).append(slot)
    # The flat parameter of a frozen parameter with a post-forward shard is an input of forward alone.
    for part in facts.of_role(Role.POST_FORWARD_SHARD):
        if part.op == "placeholder":
            for slot in slots_of(part):
                found.setdefault((require(part).unit, slot.name), [slot])
    return found


def claims(record: Record) -> list[tuple[str, str]]:
    """The parameters that a record names, as keys of `all_slots`."""
    owners = record.owners or (record.unit,) * len(record.parameters)
    return list(zip(owners, record.parameters, strict=True))


def probes(spec: UnshardSpec) -> Iterator[Probe]:
    """A few elements that tell whether a parameter's block is where it belongs.

    The first element, the last one, and along each dimension the last with all others first; on the sharded dimension
    also the rows on both sides of the first border between ranks.
    """
    if 0 in spec.shape:
        return
    places = {(0,) * len(spec.shape), tuple(extent - 1 for extent in spec.shape)}
    for dim, extent in enumerate(spec.shape):
        ends = {extent - 1}
        if dim == spec.dim:
            rows = spec.shard_shape[dim]
            ends |= {min(rows - 1, extent - 1), min(rows, extent - 1)}
        places |= {tuple(end if d == dim else 0 for d in range(len(spec.shape))) for end in ends}
    for place in sorted(places):
        yield _probe(spec, place)


def _probe(spec: UnshardSpec, place: tuple[int, ...]) -> Probe:
    element = linear(place, spec.shape)
    if spec.dim is None:
        return Probe(element, 0, spec.offset + element)
    rank, row = divmod(place[spec.dim], spec.shard_shape[spec.dim])
    local = (*place[: spec.dim], row, *place[spec.dim + 1 :])
    return Probe(element, rank, spec.offset + linear(local, spec.shard_shape))
