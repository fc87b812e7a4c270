"""A graph that is planned for other sizes starts its collectives in the order of another rank's plan, and is right.

Operators that are not torch's may draw random numbers and not say so: plans call them in the program's order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import FSDPOptions, RankMismatchError, explain
from fsdp_compile.cost.fusion import Fusion
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.ir.calls import line_of, names_in, numbered, starts_of
from fsdp_compile.ir.graph import KEY, Phase, StepGraph, record_of
from fsdp_compile.passes.follow_order import _keys
from fsdp_compile.passes.hide_own_collectives import HideOwnCollectives
from fsdp_compile.pipeline import transform
from tests.cost.graphs import Sketch
from tests.fake_world import fake_world
from tests.models.layers import InARow
from tests.models.round_sizes import WIDTH, Block, Stack

WIDE = 256
collectives = torch.ops._c10d_functional
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
def captured(make: Callable[[], nn.Module], *shape: int) -> tuple[StepGraph, ...]:
    x = torch.ones(shape or (64, WIDTH), device="meta")
    plan = explain(make().to("meta"), x, world_size=4, hardware=hardware("cpu", 1.0))
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


@torch.library.custom_op("fsdp_test_untold::dither", mutates_args=())
def dither(grad: torch.Tensor) -> torch.Tensor:
    return grad + torch.randn_like(grad)


@dither.register_fake
def _(grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad)


class Dithered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.ops.fsdp_test_untold.dither(grad.t() @ x)


class DitheredLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Dithered.apply(x, self.weight)
        return torch.tanh(found)


def dithered() -> nn.Module:
    """Its first layer's gradient takes longest to reduce."""
    return InARow([DitheredLayer(32 * WIDE, WIDE), *(DitheredLayer(WIDE, WIDE) for _ in range(4))])


def draws(step: StepGraph) -> list[str]:
    return [str(node) for node in step.graph.nodes if node.target is torch.ops.fsdp_test_untold.dither.default]


@pytest.mark.long
def test_no_plan_and_no_order_of_another_rank_changes_the_order_of_draws() -> None:
    backward = captured(dithered, 4096, 32 * WIDE)[1]
    plans = {gb_per_s: planned(backward, gb_per_s) for gb_per_s in GB_PER_S}
    orders = {rate: order_of(step) for rate, step in plans.items()}
    followed = [planned(backward, mine, orders[other]) for mine, other in itertools.permutations(GB_PER_S, 2)]
    assert len(draws(backward)) == 5
    for step in (*plans.values(), *followed):
        assert draws(step) == draws(backward)


def test_an_order_of_reductions_that_would_change_the_order_of_draws_is_refused() -> None:
    backward = captured(dithered, 4096, 32 * WIDE)[1]
    options = FSDPOptions(prefetch=0, bucket_mb=0)
    order = order_of(transform(backward.copy(), options))
    first, second = [place for place, line in enumerate(order) if "reduce_scatter" in line][:2]
    order[first : second + 1] = [*order[first + 1 : second + 1], order[first]]
    with pytest.raises(RankMismatchError, match="in the order of another rank's"):
        transform(backward.copy(), options, follow=order)


@pytest.mark.parametrize(
    ("operator", "moves"), [(torch.ops.aten.relu, True), (torch.ops.fsdp_test_untold.dither, False)]
)
def test_draws_are_not_computed_behind_the_programs_collectives(operator: Any, *, moves: bool) -> None:
    s = Sketch(Phase.BACKWARD)
    x, y = s.input("x", WIDE, WIDE), s.input("y", WIDE, WIDE)
    first = s.call(operator.default, x)
    sent = s.call(collectives.all_reduce.default, s.call(operator.default, y), "sum", "0")
    step = s.done(first, s.call(collectives.wait_tensor.default, sent))
    before = [n for n in step.graph.nodes if n.op == "call_function"]
    with fake_world(4):  # whose group torch calls "0"
        plan = HideOwnCollectives(hardware("cpu", 0.01), Fusion.KERNELS).plan(step)
    assert (plan.order != () and list(plan.order) != before) is moves
