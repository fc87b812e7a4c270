"""The flat tensors of parameter groups among the inputs of a graph: found in Dynamo's, noted in AOTAutograd's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fsdp_compile._torch.dynamo import index_among_inputs
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2.param_group import ParamGroup
from fsdp_compile.ir.edit import set_read_text
from fsdp_compile.ir.graph import KEY, Phase, Record, Role
from fsdp_compile.ir.queries import GRADIENTS_OF_READS, read_text
from fsdp_compile.layout.spec import GradPlacement, UnshardSpec, parse
from fsdp_compile.ops.embedding import LOOK_UP
from fsdp_compile.ops.unshard import UNSHARD

PENDING = {GradPlacement.UNREDUCED: Role.UNREDUCED_GRAD, GradPlacement.REDUCE_SCATTERED: Role.PARTIAL_GRAD}
"""The inputs of a graph with gradients of earlier backwards, by how far these are reduced."""


def flat_inputs(inputs: Sequence[object]) -> dict[int, Record]:
    """Finds flat tensors, and the inputs that belong to them, among the inputs of Dynamo's graph."""
    groups = {i: group for i, value in enumerate(inputs) if (group := ParamGroup.of(value)) is not None}
    titles: dict[str, Any] = {}
    found: dict[int, Record] = {}
    extra: dict[int, Record] = {}
    for i, group in groups.items():
        title = group.title
        while titles.setdefault(title, group.unit) is not group.unit:
            title += "'"
        record = Record(
            Role.FLAT, title, tuple(p.name for p in group.params), tuple(p.spec for p in group.params), Phase.FORWARD
        )
        found[i] = record
        for param in group.params:
            if param.spec.offset in group.gathered:
                extra[id(group.gathered[param.spec.offset])] = dataclasses.replace(
                    record, role=Role.UNSHARDED_PARAM, parameters=(param.name,), specs=(param.spec,)
                )
        for leaf in group.pending.leaves.values():
            extra[id(leaf)] = dataclasses.replace(record, role=Role.GRAD_ACCUMULATOR)
        for placement, blank in group.pending.blanks.items():
            extra[id(blank)] = dataclasses.replace(record, role=PENDING[placement])
    return found | {i: extra[id(value)] for i, value in enumerate(inputs) if id(value) in extra}


def name_inputs(graph: fx.Graph, flats: Mapping[int, Record]) -> None:
    """Writes the records on the placeholders of a graph that AOTAutograd made of Dynamo's."""
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        index = index_among_inputs(node, position)
        if index is not None and index in flats and not node.name.startswith("tangents"):
            record = flats[index]
            node.meta[KEY] = _as_read(node, record) if record.role is Role.FLAT else record


def _as_read(flat: fx.Node, record: Record) -> Record:
    """The record of a flat parameter with the specs by which this graph reads it."""
    # Modules in eval mode may read in another dtype than the group's specs say.
    read: dict[int, UnshardSpec] = {}
    markers = [user for user in flat.users if user.target in (UNSHARD, LOOK_UP, *GRADIENTS_OF_READS)]
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
