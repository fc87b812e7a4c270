"""The lower bound of a plan: no plan of the same model is below the bound of any in the same memory."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import MixedPrecision
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from tests import long
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Broken, Partial, Stack, explained

LINKS = (0.05, 1.0, 50.0)
"""GB/s: the link decides, neither does, computing does."""
EAGER: dict[str, Any] = {"lower": "eager"}


class _Looked(nn.Module):
    """Everything depends on a large table, and so does nothing before its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16 * WIDTH, WIDTH)
        self.body = Stack(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(rows))


def _plan(model: type[nn.Module], gb_per_s: float, **options: object) -> Plan:
    if model is not _Looked:
        return explained(model, 4, hardware(link=gb_per_s), **options)
    with torch.device("meta"):
        made, rows = model(), torch.zeros(512, dtype=torch.long)
    return explain(made, rows, world_size=4, options={**EAGER, **options}, hardware=hardware(link=gb_per_s))


@long.parametrize(
    "options",
    [
        {},
        {"prefetch": 0},
        {"prefetch": "BACKWARD_PRE"},
        {"reshard_after_forward": False},
        {"reshard_after_forward": "auto"},
        {"reshard_after_forward": 2},
        {"embedding": "sharded"},
        {"bucket_mb": 0},
    ],
    always=[{"reshard_after_forward": "auto"}],
    ids=str,
)
def test_no_plan_is_below_it(options: dict[str, Any]) -> None:
    for gb_per_s in LINKS:
        plan = _plan(_Looked, gb_per_s, **options)
        assert 0 < plan.bound.time_us <= plan.step_us
        assert 0 < plan.bound.sent_bytes <= plan.volume.total_bytes


@pytest.mark.parametrize("model", [Broken, Partial])
def test_graph_breaks_and_what_is_frozen_or_not_read(model: type[nn.Module]) -> None:
    plan = _plan(model, 0.05)
    assert 0.6 < plan.bound.time_us / plan.step_us <= 1
    assert 0.6 < plan.bound.sent_bytes / plan.volume.total_bytes <= 1


def test_replicas_have_a_link_of_their_own() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        plan = explained(Stack, None, hardware(link=0.05), mesh=mesh)
    assert 0.6 < plan.bound.sent_bytes / plan.volume.total_bytes <= 1
    assert 0 < plan.bound.time_us <= plan.step_us


def test_what_hides_behind_nothing_is_in_it() -> None:
    """At first the table must come, at last its gradient must go; a floor of computing alone says nothing of either."""
    plan = _plan(_Looked, 1.0)
    table_us = 16 * WIDTH * WIDTH * 4 * 3 / 4 / 1e3 / 0.9  # 0.9 of 1 GB/s
    assert plan.bound.time_us > sum(graph.compute_us for graph in plan.forward) + 2 * table_us
    sharded = _plan(_Looked, 1.0, embedding="sharded")
    assert sharded.bound.time_us < plan.bound.time_us


def test_more_memory_lowers_it() -> None:
    plans = [_plan(Stack, 0.05, prefetch=distance) for distance in (0, 1, 3)]
    assert [plan.bound.sent_bytes for plan in plans] == sorted((p.bound.sent_bytes for p in plans), reverse=True)
    assert plans[0].bound.sent_bytes > plans[-1].bound.sent_bytes


@long.parametrize("gather", [torch.int8, "nvfp4"], always=["nvfp4"])
def test_fewer_bits_are_counted_as_they_are_sent(gather: torch.dtype | str) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, gather_dtype=gather)
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context:
            plan = _plan(Stack, 0.05, mp_policy=policy, prefetch=0)
        assert 0.6 < plan.bound.sent_bytes / plan.volume.total_bytes <= 1
        assert 0 < plan.bound.time_us <= plan.step_us
    for reshard in (True, 2):
        volume = _plan(Stack, 0.05, mp_policy=policy, reshard_after_forward=reshard).volume
        assert 0.95 < volume.full_sharding_bytes / volume.total_bytes < 1.05
