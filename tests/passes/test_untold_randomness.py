"""Operators that are not torch's may draw random numbers and not say so: plans call them in the program's order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile import FSDPOptions, RankMismatchError, explain
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.ir.calls import line_of, numbered, starts_of
from fsdp_compile.ir.graph import Phase, StepGraph
from fsdp_compile.passes.hide_own_collectives import HideOwnCollectives
from fsdp_compile.pipeline import transform
from tests.cost.graphs import Sketch
from tests.fake_world import fake_world
from tests.models.layers import InARow

WIDTH = 256
GB_PER_S = (0.01, 1.0, 8.0, 64.0, 1000.0)
collectives = torch.ops._c10d_functional


@torch.library.custom_op("fsdp_test_untold::dither", mutates_args=())
def dither(grad: torch.Tensor) -> torch.Tensor:
    return grad + torch.randn_like(grad)


@dither.register_fake
def _(grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(grad)


class _Dithered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.ops.fsdp_test_untold.dither(grad.t() @ x)


class _Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Dithered.apply(x, self.weight)
        return torch.tanh(found)


def _backward() -> StepGraph:
    """Of a model whose first layer's gradient takes longest to reduce."""
    model = InARow([_Layer(32 * WIDTH, WIDTH), *(_Layer(WIDTH, WIDTH) for _ in range(4))]).to("meta")
    x = torch.ones(4096, 32 * WIDTH, device="meta")
    plan = explain(model, x, world_size=4, hardware=hardware("cpu", 1.0))
    assert plan.traced is not None
    return plan.traced.regions[0].captured[1]


def _drawing(step: StepGraph) -> list[str]:
    return [str(node) for node in step.graph.nodes if node.target is torch.ops.fsdp_test_untold.dither.default]


@pytest.mark.long
def test_no_plan_and_no_order_of_another_rank_changes_theirs() -> None:
    backward = _backward()
    before = _drawing(backward)
    assert len(before) == 5

    def planned(gb_per_s: float, follow: list[str] | None = None) -> StepGraph:
        options = FSDPOptions(hardware=hardware("cpu", gb_per_s), bucket_mb=0)
        return transform(backward.copy(), options, follow=follow)

    plans = {gb_per_s: planned(gb_per_s) for gb_per_s in GB_PER_S}
    orders = {rate: numbered([line_of(node) for node in starts_of(step)]) for rate, step in plans.items()}
    followed = [planned(mine, orders[other]) for mine, other in itertools.permutations(GB_PER_S, 2)]
    for step in (*plans.values(), *followed):
        assert _drawing(step) == before


def test_an_order_of_reductions_that_would_change_theirs_is_refused() -> None:
    backward = _backward()
    options = FSDPOptions(prefetch=0, bucket_mb=0)
    order = numbered([line_of(node) for node in starts_of(transform(backward.copy(), options))])
    first, second = [place for place, line in enumerate(order) if "reduce_scatter" in line][:2]
    order[first : second + 1] = [*order[first + 1 : second + 1], order[first]]
    with pytest.raises(RankMismatchError, match="in the order of another rank's"):
        transform(backward.copy(), options, follow=order)


def _draws_in_front_of_a_collective(operator: Any) -> StepGraph:
    s = Sketch(Phase.BACKWARD)
    x, y = s.input("x", WIDTH, WIDTH), s.input("y", WIDTH, WIDTH)
    first = s.call(operator, x)
    sent = s.call(collectives.all_reduce.default, s.call(operator, y), "sum", "0")
    wait = s.call(collectives.wait_tensor.default, sent)
    return s.done(first, wait)


def test_they_are_not_computed_behind_the_programs_collectives() -> None:
    with fake_world(4):
        group = torch.distributed.group.WORLD
        assert group is not None
        assert group.group_name == "0"
        draws = torch.ops.fsdp_test_untold.dither.default
        for operator, moves in ((torch.ops.aten.relu.default, True), (draws, False)):
            step = _draws_in_front_of_a_collective(operator)
            before = [n for n in step.graph.nodes if n.op == "call_function"]
            plan = HideOwnCollectives(hardware("cpu", 0.01)).plan(step)
            assert (plan.order != () and list(plan.order) != before) is moves
