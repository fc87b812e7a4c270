"""Graphs that hold gradients back, or take held ones along: what is sent, and which broken ones are caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from fsdp_compile import units
from fsdp_compile.fsdp2.module_class import refresh_reads
from fsdp_compile.ir.graph import KEY, Role, StepGraph, require, role_of
from fsdp_compile.layout.spec import GradPlacement
from fsdp_compile.verify.check import complaints
from fsdp_compile.verify.facts import Kind, collectives_of
from tests.models.graphs import MODELS
from tests.verify.captured import World, capture


@dataclasses.dataclass(frozen=True)
class Holding(World):
    """Holds gradients back."""

    def shard(self, model: nn.Module) -> None:
        super().shard(model)
        model.set_requires_gradient_sync(False)  # type: ignore[operator]


@dataclasses.dataclass(frozen=True)
class TakingAlong(World):
    """Has unreduced gradients, and reduces."""

    def shard(self, model: nn.Module) -> None:
        super().shard(model)
        for unit in units(model):
            for group in unit.groups:
                for placement in (GradPlacement.UNREDUCED, GradPlacement.REDUCE_SCATTERED):
                    if placement is GradPlacement.UNREDUCED or group.params[0].spec.replicas > 1:
                        zeros = torch.zeros(group.pending.numel(placement))
                        group.pending.add(placement, zeros, [param.spec.offset for param in group.params])
                        group.pending.placements.add(placement)
                refresh_reads(group)


def backward(world: World) -> StepGraph:
    make, inputs = MODELS["stack"]
    return capture(make, inputs(), world)[1]


def kinds(step: StepGraph) -> list[Kind]:
    return [collective.kind for collective in collectives_of(step.graph.nodes)]


@pytest.mark.core
def test_a_graph_that_holds_gradients_back_sends_none() -> None:
    step = backward(Holding(2))
    assert set(kinds(step)) == {Kind.GATHER}
    assert list(step.nodes(Role.UNREDUCED_GRADIENT))
    assert complaints(step) == []


@pytest.mark.long
def test_held_gradients_are_reduced_by_the_collectives_that_there_are_anyway() -> None:
    for replicas in (1, 2):
        size = 2 * replicas
        plain, along = backward(World(size, replicas=replicas)), backward(TakingAlong(size, replicas=replicas))
        assert kinds(along) == kinds(plain)
        assert list(along.nodes(Role.ADD_UNREDUCED))
        assert bool(list(along.nodes(Role.ADD_PARTIAL))) == (replicas > 1)
        assert complaints(along) == []


def left_out(step: StepGraph) -> str:
    total = _sum(step, Role.ADD_UNREDUCED)
    total.replace_all_uses_with(total.args[1])  # type: ignore[arg-type]
    step.graph.erase_node(total)
    return "takes along 0 of the 1"


def added_twice(step: StepGraph) -> str:
    total = _sum(step, Role.ADD_UNREDUCED)
    with step.graph.inserting_after(total):
        again = step.graph.call_function(torch.ops.aten.add.Tensor, (total.args[0], total))
    again.meta.update(total.meta)
    total.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    return "takes along 2 of the 1"


def of_the_neighbour(step: StepGraph) -> str:
    total = _sum(step, Role.ADD_UNREDUCED, named="norm.bias")
    part = total.args[0]
    assert isinstance(part, fx.Node)
    width = part.args[3] - part.args[2]  # type: ignore[operator]
    part.args = (*part.args[:2], part.args[2] + width, part.args[3] + width)  # type: ignore[operator]
    return "of the unreduced gradients, not to"


def _sum(step: StepGraph, role: Role, named: str = "norm.weight") -> fx.Node:
    return next(
        node
        for node in step.nodes(role)
        if node.target is torch.ops.aten.add.Tensor and require(node).parameters[0].endswith(named)
    )


@pytest.mark.parametrize("edit", [left_out, added_twice, of_the_neighbour])
def test_held_gradients_that_do_not_enter_exactly_one_reduction_are_noticed(edit: Callable[[StepGraph], str]) -> None:
    step = backward(TakingAlong(2))
    says = edit(step)
    found = complaints(step)
    assert any(c.rule == "reduced-once" and says in c.what for c in found), found


def test_held_rows_in_the_wrong_order_are_noticed() -> None:
    step = backward(Holding(2))
    parts = next(n for n in step.nodes(Role.SHARD_GRADIENT) if n.target is torch.ops.aten.cat.default and _ends(n))
    parts.update_arg(0, list(reversed(parts.args[0])))  # type: ignore[arg-type]
    assert any(c.rule == "reduced-once" for c in complaints(step))


def _ends(node: fx.Node) -> bool:
    return len(node.args[0]) > 2 and any(role_of(user) is Role.UNREDUCED_GRADIENT for user in node.users)  # type: ignore[arg-type]


def test_what_forward_keeps_is_an_input_of_backward_that_nothing_gathers_again() -> None:
    step = backward(Holding(2, reshard_after_forward="auto"))
    (*_, kept) = step.nodes(Role.SAVED_PARAM)
    assert complaints(step) == []
    gathered = require(next(step.nodes(Role.GATHER)))
    kept.meta[KEY] = dataclasses.replace(
        gathered, role=Role.SAVED_PARAM, parameters=gathered.parameters[:1], specs=gathered.specs[:1]
    )
    assert any(c.rule == "gathered-once" and "holds already" in c.what for c in complaints(step))
