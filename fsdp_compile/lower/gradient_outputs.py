"""The gradients that a backward graph makes: of which parameters, and how far reduced."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.ir.graph import MADE, Role, StepGraph, require, role_of
from fsdp_compile.ir.queries import beside
from fsdp_compile.layout.spec import GradPlacement, Update
from fsdp_compile.lower.wrappers import Compiled
from fsdp_compile.runtime import gradients
from fsdp_compile.runtime.kernels import consume_accumulated
from fsdp_compile.runtime.units import FSDPParamGroup


@dataclasses.dataclass(frozen=True)
class GradOutput:
    """The gradients of one flat parameter that a backward graph makes.

    Attributes:
        flat: Position of the flat parameter among the inputs.
        offsets: Slots that get gradients.
        covers_all: Whether these are all slots of the flat parameter.
        grad_placement: How far they are reduced.
        unsharded_accumulated_grad: Position of the unreduced gradients that are added to them, if there are any.
        partial_reduce_output: Position of the reduce-scattered gradients that are added before the all-reduce, if there
            are any.
        update: Where the gradients go: out of the graph, or into an update inside of it.
    """

    flat: int
    offsets: tuple[int, ...]
    covers_all: bool
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
            held, partial = (_place_of(node, role, place) for role in (Role.UNREDUCED_GRAD, Role.PARTIAL_GRAD))
            update = Update.IN_BACKWARD if index in updated else Update.AFTER_BACKWARD
            covers_all = sum(spec.extent for spec in mine) == node.meta["val"].numel()
            found.append(GradOutput(index, offsets, covers_all, mine[0].grad_placement, held, partial, update))
    return found


def _place_of(flat: fx.Node, role: Role, place: dict[fx.Node, int]) -> int | None:
    node = beside(flat, role)
    return None if node is None else place[node]


def note_grad_outputs(compiled: Compiled, noted: Sequence[GradOutput]) -> Compiled:
    """Wraps a compiled backward so that parameters without a gradient keep `None`, and pending gradients count once."""

    def run(args: list[Any]) -> Any:
        flats = [FSDPParamGroup.of(args[each.flat]) or _copied_from(args[each.flat], each) for each in noted]
        for flat, each in zip(flats, noted, strict=True):
            _before(args, each, flat)
        made = compiled(args)
        for flat, each in zip(flats, noted, strict=True):
            if flat is not None and each.update is Update.AFTER_BACKWARD:  # else the graph says so itself
                gradients.mark_produced(flat, each.offsets, each.grad_placement)
        return made

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _copied_from(copy: torch.Tensor, each: GradOutput) -> FSDPParamGroup | None:
    """The group of a copy of a flat parameter; `None` for values of no group, all of whose slots get gradients."""
    if each.update is Update.IN_BACKWARD:
        raise _is_copy(
            "backward was given a copy of the parameters that it is to update",
            "step_in_backward()",
            ", or optimizer.step() without step_in_backward()",
        )
    if isinstance(copy, nn.Parameter):  # no copy: its model was deleted after the forward
        return None
    owner = _group_with_values(copy)
    if owner is None and not each.covers_all:
        raise _is_copy(
            "backward was given other values than the parameters have, or those of several parameter groups, and "
            "cannot tell which parameters get no gradient",
            "a forward that leaves parameters out,",
        )
    return owner


def _group_with_values(flat: torch.Tensor) -> FSDPParamGroup | None:
    """The one group whose flat parameter has the values of a tensor that hooks on saved tensors have copied."""
    alike = [
        group
        for group in FSDPParamGroup.alive()
        if (group.flat_param.shape, group.flat_param.dtype, group.flat_param.device)
        == (flat.shape, flat.dtype, flat.device)
        and torch.equal(group.flat_param, flat)
    ]
    return alike[0] if len(alike) == 1 else None


def _before(args: list[Any], each: GradOutput, flat: FSDPParamGroup | None) -> None:
    if each.unsharded_accumulated_grad is not None or each.partial_reduce_output is not None:
        _consume_pending(args, each, flat)


def _consume_pending(args: list[Any], each: GradOutput, flat: FSDPParamGroup | None) -> None:
    """Leaves among the inputs only those accumulated gradients that no other backward has consumed."""
    held, partial = (
        None if at is None else args[at] for at in (each.unsharded_accumulated_grad, each.partial_reduce_output)
    )
    if flat is not None:
        held, partial = consume_accumulated(flat, each.offsets, held, partial)
    else:  # a copy by saved-tensor hooks, of unknown owner: its accumulated gradients are reduced at the end
        held, partial = (None if value is None else value.new_zeros(value.shape) for value in (held, partial))
    for at, value in ((each.unsharded_accumulated_grad, held), (each.partial_reduce_output, partial)):
        if at is not None:
            args[at] = value


def _is_copy(what: str, where: str, or_else: str = "") -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what}: hooks on saved tensors replaced them",
        where=f"{where} under torch.autograd.graph.saved_tensors_hooks() or save_on_cpu()",
        instead=f"hooks that return the very tensors that do not require grad or are leaves{or_else}",
    )
