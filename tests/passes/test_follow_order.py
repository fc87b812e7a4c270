"""A graph that is planned for other sizes starts its collectives in the order of another rank's plan, and is right."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from fsdp_compile import FSDPOptions, RankMismatchError, explain
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.ir.calls import line_of, names_in, numbered, starts_of
from fsdp_compile.ir.graph import KEY, StepGraph, record_of
from fsdp_compile.passes.follow_order import _keys
from fsdp_compile.pipeline import transform
from tests.models.round_sizes import WIDTH, Block, Stack

GB_PER_S = (0.01, 1.0, 8.0, 64.0, 1000.0)
"""Links on which a plan is another one each: what a rank plans for other sizes differs by no more."""


class Tapered(nn.Module):
    """Its first layer's gradient is the last, and takes longest to reduce: others are computed behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8 * WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.cat([x] * 8, dim=-1))
        for block in self.blocks:
            x = block(x) * self.scale
        return x


@functools.cache
def captured(make: Callable[[], nn.Module]) -> tuple[StepGraph, ...]:
    plan = explain(make(), torch.ones(64, WIDTH, device="meta"), world_size=4, hardware=hardware("cpu", 1.0))
    assert plan.traced is not None
    return tuple(plan.traced.regions[0].captured)


def planned(step: StepGraph, gb_per_s: float, follow: Sequence[str] | None = None) -> StepGraph:
    options = FSDPOptions(hardware=hardware("cpu", gb_per_s), bucket_mb=0)  # "auto" depends on the link
    return transform(step.copy(), options, follow=follow)


def order_of(step: StepGraph) -> list[str]:
    return numbered([line_of(node) for node in starts_of(step)])


def test_every_plan_can_follow_every_other_one_and_keeps_all_rules() -> None:
    for step, least in zip(captured(Tapered), (1, 3), strict=True):
        orders = {gb_per_s: order_of(planned(step, gb_per_s)) for gb_per_s in GB_PER_S}
        assert len(set(map(tuple, orders.values()))) >= least
        for mine, other in itertools.permutations(GB_PER_S, 2):
            assert order_of(planned(step, mine, orders[other])) == orders[other]  # and the verifier has passed it


def with_earlier_gathers(order: list[str], draw: random.Random) -> list[str]:
    """An order in which some gathers start before reductions that they have followed."""
    found: list[str] = []
    for line in order:
        place = len(found)
        while "all_gather" in line and place and "reduce_scatter" in found[place - 1] and draw.random() < 0.7:
            place -= 1
        found.insert(place, line)
    return found


@pytest.mark.parametrize("make", [Stack, Tapered])
def test_orders_that_no_plan_here_has_are_followed_too(make: Callable[[], nn.Module]) -> None:
    draw, backward = random.Random(0), captured(make)[1]
    at_need = FSDPOptions(prefetch=0, bucket_mb=0)
    order = order_of(transform(backward.copy(), at_need))
    others = [with_earlier_gathers(order, draw) for _ in range(10)]
    assert len(set(map(tuple, others))) >= 5
    for other in others:
        assert order_of(planned(backward, 8.0, other)) == other


def test_a_plan_that_is_followed_already_stays() -> None:
    for step in captured(Tapered):
        mine = planned(step, 8.0)
        again = planned(step, 8.0, order_of(mine))
        assert [str(node) for node in again.graph.nodes] == [str(node) for node in mine.graph.nodes]


def test_an_order_that_the_data_forbids_or_of_another_graph_is_refused() -> None:
    step = captured(Tapered)[1]
    order = order_of(planned(step, 8.0))
    reductions = [line for line in order if "reduce_scatter" in line]
    for wrong in ([reductions[-1], *order[:-1]], order[1:], [*order[:-1], "backward: all_gather of 0 (1 float32)"]):
        with pytest.raises(RankMismatchError, match="cannot start its collectives in the order of another rank's"):
            planned(step, 8.0, wrong)
    assert order[-1] == reductions[-1]
    assert len(names_in(order[-1])) >= 1


class Two(nn.Module):
    """Two models in one graph, as of a compiled function; the second one has a parameter of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(Block(), Block())
        self.other = nn.Sequential(nn.Sequential(OrderedDict(linear=nn.Linear(WIDTH, WIDTH, bias=False))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


def with_own_names(step: StepGraph) -> StepGraph:
    """Each parameter by its name in its own model."""
    step = step.copy()
    for node in step.graph.nodes:
        if (record := record_of(node)) is not None:
            names = tuple(name.partition(".")[2] for name in record.parameters)
            node.meta[KEY] = dataclasses.replace(record, parameters=names)
    return step


def test_parameters_of_one_name_in_two_models_are_not_taken_for_each_other() -> None:
    for step in map(with_own_names, captured(Two)):
        order = order_of(planned(step, 1.0))
        assert order_of(planned(step, 1.0, order)) == order


def test_parameters_of_one_name_in_one_message_have_the_keys_of_single_ones() -> None:
    (joined,) = _keys(["forward: all_gather_into_tensor of 0, 0 (128 float32)"])
    first, second = _keys(["forward: all_gather_into_tensor of 0 (64 float32)"] * 2)
    assert joined == [*first, *second]
    assert first != second
