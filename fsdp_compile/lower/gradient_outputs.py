"""The gradients that a backward graph makes: of which parameters, and how far reduced."""

from __future__ import annotations

import dataclasses

from fsdp_compile.ir.graph import MADE, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import beside
from fsdp_compile.layout.spec import GradPlacement, Update


@dataclasses.dataclass(frozen=True)
class GradOutput:
    """The gradients of one flat parameter that a backward graph makes.

    Attributes:
        flat: Position of the flat parameter among the inputs.
        offsets: Slots that get gradients.
        grad_placement: How far they are reduced.
        unsharded_accumulated_grad: Position of the unreduced gradients that are added to them, if there are any.
        partial_reduce_output: Position of the reduce-scattered gradients that are added before the all-reduce, if there
            are any.
        update: Where the gradients go: out of the graph, or into an update inside of it.
    """

    flat: int
    offsets: tuple[int, ...]
    grad_placement: GradPlacement
    unsharded_accumulated_grad: int | None
    partial_reduce_output: int | None
    update: Update = Update.AFTER_BACKWARD


def grad_outputs(step: StepGraph) -> list[GradOutput]:
    """The flat parameters, and their slots, that a backward graph makes gradients for."""
    placeholders = step.graph.find_nodes(op="placeholder")
    place = {node: index for index, node in enumerate(placeholders)}
    made = {
        claim: spec
        for record in map(require, step.nodes(*MADE))
        for claim, spec in zip(record.claims, record.specs, strict=True)
    }
    updated = {place[node.all_input_nodes[0]] for node in step.nodes(Role.UPDATE)}
    found = []
    for node, index in place.items():
        if role_of(node) is not Role.FLAT:
            continue
        flat = require(node)
        mine = [made[flat.unit, name] for name in flat.parameters if (flat.unit, name) in made]
        if mine:
            offsets = tuple(sorted(spec.offset for spec in mine))
            waiting = (beside(node, role) for role in (Role.UNREDUCED_GRAD, Role.PARTIAL_GRAD))
            unreduced, partial = (None if each is None else place[each] for each in waiting)
            update = Update.IN_BACKWARD if index in updated else Update.AFTER_BACKWARD
            found.append(GradOutput(index, offsets, mine[0].grad_placement, unreduced, partial, update))
    return found
