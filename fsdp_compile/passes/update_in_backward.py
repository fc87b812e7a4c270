"""Updates each flat parameter as soon as its gradient is ready, so that no gradient leaves the graph.

    %grad = cat(%reduced, ...); ...; return (%grad, ...) -> %grad = cat(%reduced, ...); update(%flat, %grad)

Only flat parameters whose optimizer asked for it (`step_in_backward`), and only on their device: gradients that go to
the host leave the graph as always. Nothing that reads a flat parameter comes after its update, wherever schedules move
it (`ir/edit.py`).
"""

from __future__ import annotations

import dataclasses

from torch import fx

from fsdp_compile._torch.dynamo import index_among_inputs, index_of_source
from fsdp_compile.ir.edit import GraphBuilder, move
from fsdp_compile.ir.graph import MADE, Role, Stage, StepGraph, require, role_of
from fsdp_compile.ir.queries import InputsByFlat, flat_of, last_of, readers, upstream
from fsdp_compile.layout.spec import Update
from fsdp_compile.ops import effects


@dataclasses.dataclass(frozen=True)
class FlatUpdate:
    """Update `flat` with `gradient`, which `pieces` compute, right after `anchor`."""

    flat: fx.Node
    gradient: fx.Node
    pieces: tuple[fx.Node, ...]  # nodes that join the gradient, in graph order; they move along
    anchor: fx.Node  # the last node that has to come before
    offsets: tuple[int, ...]  # slots that have gradients


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """All updates of a graph."""

    updates: tuple[FlatUpdate, ...]


class UpdateInBackward:
    """The pass; see the module's docstring."""

    name = "update-in-backward"
    requires, ensures = Stage.BUCKETED, Stage.BUCKETED

    def plan(self, step: StepGraph) -> UpdatePlan:
        """Finds the flat gradients that are complete in the graph, and the earliest place for each."""
        order = step.order()
        made = {claim for node in step.nodes(*MADE) for claim in require(node).claims}
        flats = InputsByFlat(step.graph, Role.FLAT)
        found = []
        for gradient in step.nodes(Role.FLAT_GRADIENT):
            record, flat = require(gradient), flats.of(gradient)
            if flat is None or record.specs[0].update is not Update.IN_BACKWARD or record.specs[0].compute:
                continue
            pieces = [gradient]
            for node in reversed(upstream(gradient, Role.SHARD_GRADIENT)):
                if all(user in pieces for user in node.users):  # joined units share the division of their message
                    pieces.insert(0, node)
            before = {*readers([flat]), *(source for node in pieces for source in node.all_input_nodes)} - set(pieces)
            claims = zip(record.claims, record.specs, strict=True)
            offsets = tuple(sorted(spec.offset for claim, spec in claims if claim in made))
            found.append(FlatUpdate(flat, gradient, tuple(pieces), last_of(before, order), offsets))
        return UpdatePlan(tuple(found))

    def apply(self, step: StepGraph, plan: UpdatePlan) -> None:
        """Writes the updates and takes their gradients out of what the graph returns."""
        move(step.graph, ((one.pieces, one.anchor.next) for one in plan.updates))
        for one in plan.updates:
            record = dataclasses.replace(require(one.gradient), role=Role.UPDATE)
            step.output.args = (tuple(None if out is one.gradient else out for out in _returned(step)),)
            with step.graph.inserting_after(one.gradient):
                b = GraphBuilder(step.graph, record, one.gradient)
                b.call(effects.UPDATE, one.flat, one.gradient, list(one.offsets))


def claim_gradients(forward: StepGraph, backward: StepGraph) -> None:
    """Makes a backward return anything for what it updates: AOTAutograd detaches inputs whose gradients are None.

    Until `release_gradients`, before the graph is lowered.
    """
    updated = {flat_of(require(node)): node.all_input_nodes[0] for node in backward.nodes(Role.UPDATE)}
    if not updated:
        return
    flats = {
        index_among_inputs(node, position): flat_of(require(node))
        for position, node in enumerate(forward.graph.find_nodes(op="placeholder"))
        if role_of(node) is Role.FLAT
    }
    sources = map(index_of_source, backward.output.meta["desc"])
    backward.output.args = (
        tuple(
            updated[flats[source]] if source in flats and flats[source] in updated else out
            for source, out in zip(sources, _returned(backward), strict=True)
        ),
    )


def release_gradients(backward: StepGraph) -> None:
    """Undoes `claim_gradients`."""
    updated = {node.all_input_nodes[0] for node in backward.nodes(Role.UPDATE)}
    kept = tuple(None if out in updated else out for out in _returned(backward))
    backward.output.args = (kept,)
    # Inductor has noted which outputs are tensors that somebody sees.
    visible = backward.output.meta.get("user_visible_output_idxs", ())
    backward.output.meta["user_visible_output_idxs"] = [i for i in visible if kept[i] is not None]


def _returned(step: StepGraph) -> tuple[fx.Node | None, ...]:
    returned = step.output.args[0]
    assert isinstance(returned, tuple | list)
    return tuple(returned)
