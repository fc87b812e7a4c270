"""Finds the flat parameters among the inputs of a graph, and writes their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx

from fsdp_compile._torch.dynamo import index_among_inputs
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.edit import set_read_text
from fsdp_compile.ir.graph import KEY, Phase, Record, Role
from fsdp_compile.ir.queries import GRADIENTS_OF_READS, read_text
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, parse
from fsdp_compile.ops.embedding import LOOK_UP
from fsdp_compile.ops.unshard import UNSHARD
from fsdp_compile.runtime.units import FSDPParamGroup, FSDPUnit


def flat_inputs(inputs: Sequence[object]) -> dict[int, Record]:
    """Finds the flat parameters, and the inputs that belong to them, among the inputs of Dynamo's graph.

    Returns:
        Position of the input to its record.
    """
    found = {i: FSDPParamGroup.of(value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    flats = {i: flat for i, flat in found.items() if flat is not None}
    titles = _titles([flat.unit for flat in flats.values()])
    records = {i: _record(flat, titles[flat.unit]) for i, flat in flats.items()}
    beside = {id(t): record for i, flat in flats.items() for t, record in _beside(flat, records[i])}
    return records | {i: beside[id(value)] for i, value in enumerate(inputs) if id(value) in beside}


def _beside(flat: FSDPParamGroup, record: Record) -> Iterator[tuple[torch.Tensor, Record]]:
    """What reads of a flat parameter may take in addition to it, with the record of each."""
    for holder in flat.grads.accumulators.values():
        yield holder, dataclasses.replace(record, role=Role.GRAD_ACCUMULATOR)
    for role, place in (
        (Role.UNREDUCED_GRAD, flat.grads.unsharded_accumulated_grad),
        (Role.PARTIAL_GRAD, flat.grads.partial_reduce_output),
    ):
        if place.value is not None:
            yield place.value, dataclasses.replace(record, role=role)
    if flat.unsharded.params is not None:
        for name, spec in zip(record.parameters, record.specs, strict=True):
            kept = flat.unsharded.params.values[spec.offset]
            yield kept, dataclasses.replace(record, role=Role.UNSHARDED_PARAM, parameters=(name,), specs=(spec,))


def _titles(units: Iterable[FSDPUnit]) -> dict[FSDPUnit, str]:
    """A unique title for each unit, also where several sharded models meet in one graph."""
    titles: dict[FSDPUnit, str] = {}
    for unit in units:
        if unit not in titles:
            same = sum(unit.title == other.title for other in titles)
            titles[unit] = f"{unit.title}#{same + 1}" if same else unit.title
    return titles


def _record(flat: FSDPParamGroup, title: str) -> Record:
    """The record of a flat parameter."""
    unit = flat.unit
    # In the order of registration: that of offsets is another one.
    slots = sorted(flat.params, key=lambda slot: slot.position)
    names = tuple(unit.parameter_name(slot) for slot in slots)
    return Record(Role.FLAT, title, names, tuple(slot.spec for slot in slots), Phase.FORWARD)


def name_inputs(graph: fx.Graph, flats: Mapping[int, Record]) -> None:
    """Writes the records on the placeholders of a graph that AOTAutograd made of Dynamo's."""
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        index = index_among_inputs(node, position)
        if index is not None and index in flats and not node.name.startswith("tangents"):
            record = flats[index]
            node.meta[KEY] = _as_read(node, record) if record.role is Role.FLAT else record


def _markers(flat: fx.Node) -> Iterator[fx.Node]:
    """The markers of reads of a flat parameter and of their gradients."""
    return (user for user in flat.users if user.target in (UNSHARD, LOOK_UP, *GRADIENTS_OF_READS))


def _as_read(flat: fx.Node, record: Record) -> Record:
    """The record of a flat parameter with the specs by which this graph reads it."""
    # Modules in eval mode may read in another dtype than the group's specs say.
    read: dict[int, UnshardSpec] = {}
    markers = list(_markers(flat))
    for marker in markers:
        spec = parse(read_text(marker))
        known = read.setdefault(spec.offset, spec)
        if dataclasses.replace(known, grad_placement=spec.grad_placement) != spec:
            name = record.parameters[[s.offset for s in record.specs].index(spec.offset)]
            raise UnsupportedModelError(
                "one graph reads a parameter in two dtypes: some of its modules are in eval mode, others are not",
                where=name,
                instead="model.eval() or model.train() for all modules that share the parameter",
            )
        # A read without gradients says nothing of where they go: while they accumulate, others do.
        if known.grad_placement is GradPlacement.REDUCED:
            read[spec.offset] = spec
    for marker in markers:
        set_read_text(marker, read[parse(read_text(marker)).offset].text)
    return dataclasses.replace(record, specs=tuple(read.get(spec.offset, spec) for spec in record.specs))
