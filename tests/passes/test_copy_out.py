"""Units that are alike are copied out together; plans of drawn models keep what comes first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fsdp_compile import FSDPOptions
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.errors import BudgetTooSmallError
from fsdp_compile.ir.calls import line_of, numbered, starts_of
from fsdp_compile.ir.graph import Role, StepGraph, require, role_of
from fsdp_compile.passes.follow_order import CannotFollowError
from fsdp_compile.passes.settings import for_graph, limits_of
from fsdp_compile.pipeline import passes, transform
from fsdp_compile.verify.check import check
from tests.fake_world import fake_world
from tests.passes.sketches import HEAD, NORM, TABLE, Model, backward_of, forward_of, models
from tests.verify.captured import World, capture

aten = torch.ops.aten


class _Layer(nn.Module):
    """Two matrices with a bias between them, which backward does not gather, and a scale."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


def _stack(*hidden: int, width: int = 8) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(_Layer(width, each) for each in hidden))


def _units(hidden: Iterable[int]) -> tuple[str, ...]:
    return tuple(str(number) for number, _ in enumerate(hidden))


def _copies(step: StepGraph) -> list[tuple[str, ...]]:
    """The parameters that each copy of several units' is of, in the graph's order."""
    clones = [node for node in step.nodes(Role.COPY_OUT) if node.target is aten.clone.default]
    return [require(node).parameters for node in clones if len(require(node).units) > 1]


def _captured(*hidden: int, width: int = 8) -> list[StepGraph]:
    world = World(2, units=_units(hidden))
    return capture(_stack(*hidden, width=width), [torch.ones(3, width)], world, bucket_mb=1)


def _named(step: StepGraph, suffix: str) -> list[fx.Node]:
    return [node for node in step.nodes(Role.FULL) if require(node).parameters[0].endswith(suffix)]


@pytest.mark.core
def test_units_that_are_alike_are_copied_together() -> None:
    forward, backward = _captured(6, 6, 6)
    of_each = {"up.weight", "up.bias", "down.weight", "scale"}
    assert sorted(_copies(forward)) == sorted((f"0.{n}", f"1.{n}", f"2.{n}") for n in of_each)
    read_again = {"up.weight", "down.weight", "scale"}  # of the first unit only two: its input needs no gradient
    assert sorted(sorted(copy) for copy in _copies(backward)) == sorted([f"1.{n}", f"2.{n}"] for n in read_again)
    for full in forward.nodes(Role.FULL):
        assert full.target is aten.view.default, "the parameter is a part of the copy"
        assert full.all_input_nodes[0].target is aten.slice.Tensor


def test_units_with_others_between_them_are_not_alike() -> None:
    forward, _ = _captured(6, 6, 4, 6)
    assert {frozenset(name[0] for name in copy) for copy in _copies(forward)} == {frozenset("01")}
    assert {full.all_input_nodes[0].target for full in _named(forward, "up.weight")} == {
        aten.slice.Tensor,
        aten.clone.default,
    }


def test_parameters_with_padding_between_ranks_are_copied_alone() -> None:
    forward, _ = _captured(5, 5)
    assert _copies(forward) == [], "hidden rows do not divide by two ranks"


def test_copies_stand_where_the_first_unit_reads() -> None:
    forward, _ = _captured(6, 6, 6)
    order = forward.order()
    copies = {require(n).parameters[0]: n for n in forward.nodes(Role.COPY_OUT) if n.target is aten.clone.default}
    for name, copy in copies.items():
        (full,) = [node for node in forward.nodes(Role.FULL) if require(node).parameters == (name,)]
        reads = [order[user] for user in full.users]
        between = [node for node in order if order[copy] < order[node] < min(reads)]
        assert all(node.target in (aten.view.default, aten.slice.Tensor) or "fsdp" in node.meta for node in between)


MOST = 60
PREFETCH: tuple[int | str, ...] = ("auto", "auto", 0, 1, 2, "BACKWARD_PRE+forward_prefetch", "BACKWARD_POST", "none")
GB_PER_S = (0.001, 0.1, 1.0, 64.0)
ROWS_LAST = Model(
    {TABLE: "(root)", "layers.0.weight": "layers.0", "layers.0.bias": "layers.0", NORM: "(root)", HEAD: "(root)"},
    looked_up=True,
)
"""FSDP2's usual layout: the root's own gradients are reduced first, and the rows of its table are averaged last."""
IN_ORDER = (torch.ops.aten.rand_like.default, torch.ops._c10d_functional.all_reduce.default)


@st.composite
def options(draw: st.DrawFn) -> FSDPOptions:
    prefetch = draw(st.sampled_from(PREFETCH))
    return FSDPOptions(
        prefetch=prefetch,
        bucket_mb=draw(st.sampled_from((0, 0, 1))),
        reduce_layout=draw(st.sampled_from(("aligned", "fsdp2"))),
        hardware=hardware("cpu", draw(st.sampled_from(GB_PER_S))) if prefetch == "auto" else None,
    )


def effects(step: StepGraph) -> list[fx.Node]:
    """The model's nodes that draw and send, in their order, once it is sure that nothing reads what was overwritten."""
    model = [node for node in step.graph.nodes if role_of(node) is None and node.op == "call_function"]
    for place, node in enumerate(model):
        if node.target is torch.ops.aten.copy_.default:
            assert [late for late in model[place + 1 :] if node.args[0] in late.all_input_nodes] == []
    return [node for node in model if node.target in IN_ORDER]


def order_of(step: StepGraph) -> list[str]:
    return numbered([line_of(node) for node in starts_of(step)])


def planned(step: StepGraph, chosen: FSDPOptions) -> StepGraph:
    """Runs every pass and looks at the order that each leaves."""
    chosen, before = for_graph(step, chosen), effects(step)
    for graph_pass in passes(chosen):
        graph_pass.apply(step, graph_pass.plan(step))
        step.graph.lint()
        assert effects(step) == before, graph_pass.name
    check(step, limits=limits_of(step.phase, chosen))
    return step


@settings(max_examples=MOST)
@given(models(), options())
@example(ROWS_LAST, FSDPOptions(prefetch=1))
@example(ROWS_LAST, FSDPOptions(prefetch="BACKWARD_POST"))
@example(dataclasses.replace(ROWS_LAST, updated=True), FSDPOptions(bucket_mb=0))
def test_every_pass_keeps_what_has_to_come_first(model: Model, chosen: FSDPOptions) -> None:
    if model.lists:  # what is joined with a unit in front may be needed before the one that names it
        chosen = dataclasses.replace(chosen, bucket_mb=0)
    with fake_world(2):
        for step in (forward_of(model), backward_of(model)):
            planned(step, chosen)


@pytest.mark.long
@settings(max_examples=MOST // 4)
@given(models(), st.sampled_from(GB_PER_S), st.sampled_from(GB_PER_S))
def test_the_plan_of_another_rank_is_followed_or_refused(model: Model, mine: float, other: float) -> None:
    with fake_world(2):
        for step in (forward_of(model), backward_of(model)):
            options = [FSDPOptions(hardware=hardware("cpu", rate), bucket_mb=0) for rate in (mine, other)]
            order = order_of(planned(step.copy(), options[1]))
            before = effects(step)
            try:
                transform(step, options[0], follow=order)
            except CannotFollowError:
                continue
            assert order_of(step) == order
            assert effects(step) == before


@settings(max_examples=MOST // 4)
@given(models(), st.sampled_from((1.0, 1.3)))
@example(ROWS_LAST, 1.0)
def test_the_least_budget_of_an_error_has_a_plan(model: Model, times: float) -> None:
    model = dataclasses.replace(model, lists=False)  # which a budget excludes
    with fake_world(2):
        for step in (forward_of(model), backward_of(model)):
            try:
                transform(step.copy(), FSDPOptions(memory_budget_gb=1e-9))
            except BudgetTooSmallError as error:
                transform(step, FSDPOptions(memory_budget_gb=times * error.least_bytes / 1e9))
