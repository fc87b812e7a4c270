"""`Plan.at`: a plan for other ranks or another link is the one that tracing there would have given."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import MixedPrecision
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.errors import BudgetTooSmallError, ConfigError
from fsdp_compile.explain import api
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from tests import long
from tests.fake_world import fake_world
from tests.models.round_sizes import Stack, explained, on_meta

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Odd(nn.Module):
    """Shapes that divide over nothing, a 0-d parameter, a frozen one and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(67, 301)
        self.down = nn.Linear(301, 67)
        self.frozen = nn.Linear(67, 67).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.frozen(self.down(self.up(x).relu())) * self.scale
        return x


def _explain(ranks: int, make: type[nn.Module] = Stack, gb_per_s: float = 50.0) -> Plan:
    x = torch.zeros(8, 67) if make is Odd else 64
    return explained(make, ranks, hardware(link=gb_per_s), x, mp_policy=MIXED)


@pytest.fixture(scope="module")
def plans() -> dict[type[nn.Module], Plan]:
    return {make: _explain(4, make) for make in (Stack, Odd)}


@pytest.fixture
def plan(plans: dict[type[nn.Module], Plan]) -> Plan:
    return plans[Stack]


@long.parametrize(
    ("make", "ranks"),
    [(Stack, 2), (Stack, 8), (Stack, 64), (Stack, 1), (Odd, 3), (Odd, 16)],
    always=[(Stack, 64), (Odd, 3)],
)
def test_it_is_the_plan_of_a_world_of_that_size(
    plans: dict[type[nn.Module], Plan], make: type[nn.Module], ranks: int
) -> None:
    assert plans[make].at(world_size=ranks) == _explain(ranks, make)


@pytest.mark.long
def test_a_link_can_be_exchanged_together_with_the_ranks_and_back(plan: Plan) -> None:
    elsewhere = plan.at(world_size=4096, gb_per_s=3.0)
    assert elsewhere == _explain(4096, gb_per_s=3.0)
    assert elsewhere.at(world_size=4, gb_per_s=50.0) == plan


def _read_otherwise(kind: str, ranks: int) -> Plan:
    """A plan of a model whose parameters are read in another dtype than their unit says."""
    model, x = on_meta(Stack)
    policy = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    options = {"lower": "eager"} if kind == "autocast" else {"lower": "eager", "mp_policy": policy}
    model.train(kind == "autocast")
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        return explain(model, x, world_size=ranks, options=options, hardware=hardware(link=7.0))


def test_a_graph_that_one_rank_alone_has_is_not_taken_for_that_of_several() -> None:
    assert _read_otherwise("autocast", 4).at(world_size=8) == _read_otherwise("autocast", 8)
    for begin, end in ((1, 8), (8, 1)):
        with pytest.raises(ConfigError, match=r"one rank has another graph than several: parameters that are cast"):
            _read_otherwise("autocast", begin).at(world_size=end)
        assert _read_otherwise("eval", begin).at(world_size=end) == _read_otherwise("eval", end)
    looked = explained(lambda: nn.Embedding(64, 16), 1, x=torch.zeros(8, dtype=torch.long), embedding="sharded")
    with pytest.raises(ConfigError, match=r"one rank has another graph than several: embedding="):
        looked.at(world_size=8)


def _budgeted(ranks: int, budget_bytes: float, **options: Any) -> Plan:
    return explained(lambda: Stack(6), ranks, x=512, memory_budget_gb=budget_bytes / 1e9, **options)


def _least_bytes(ranks: int) -> int:
    with pytest.raises(BudgetTooSmallError) as caught:
        _budgeted(ranks, 1.0, activations="saved")
    return caught.value.least_bytes


@pytest.mark.long
def test_blocks_that_are_computed_again_are_not_chosen_anew() -> None:
    few, many = 2, 64
    budget_bytes = (_least_bytes(few) + _least_bytes(many)) / 2
    tight, roomy = _budgeted(few, budget_bytes), _budgeted(many, budget_bytes)
    assert tight.graphs[1].flops > roomy.graphs[1].flops
    assert tight.at(gb_per_s=1).graphs[1].flops == tight.graphs[1].flops
    assert roomy.at(world_size=2 * many).graphs[1].flops == roomy.graphs[1].flops
    for plan, ranks in ((tight, many), (roomy, few)):
        with pytest.raises(ConfigError, match=f"was chosen when the model was traced, for {plan.world_size} ranks"):
            plan.at(world_size=ranks)


def test_a_part_of_the_world_does_not_grow_with_it() -> None:
    with fake_world(16):
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        plan = explained(Stack, None, mesh=mesh["dp"])
        assert plan.at(gb_per_s=50.0).units == plan.units
        with pytest.raises(ConfigError, match="sharded over 4 of 16 ranks"):
            plan.at(world_size=32)


def test_nothing_is_traced_again(plan: Plan) -> None:
    with (
        mock.patch.object(api, "trace", side_effect=AssertionError),
        mock.patch("torch.compile", side_effect=AssertionError),
    ):
        assert plan.at(world_size=8).world_size == 8


@pytest.mark.long
def test_a_process_can_explain_as_often_as_it_likes() -> None:
    limit = torch._dynamo.config.recompile_limit
    assert all(len(_explain(ranks).graphs) == 2 for ranks in range(2, limit + 3))


def test_numbers_that_make_no_sense_are_refused(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="no 0 ranks"):
        plan.at(world_size=0)
    with pytest.raises(ConfigError, match="-1 GB/s"):
        plan.at(gb_per_s=-1)
    with pytest.raises(ConfigError, match="has run"):
        dataclasses.replace(plan, traced=None).at(world_size=8)
