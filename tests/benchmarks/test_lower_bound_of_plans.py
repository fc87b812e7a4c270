"""The lower bound of a plan: no plan of the same model is below the bound of any in the same memory."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.lower_bound import lower_bound
from fsdp_compile import MixedPrecision
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.explain.plan import Plan
from tests import long
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Broken, Partial, Stack, explained

LINKS = (0.05, 1.0, 50.0)
"""GB/s: the link decides, neither does, computing does."""


class _Looked(nn.Module):
    """Everything depends on a large table, and so does nothing before its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16 * WIDTH, WIDTH)
        self.body = Stack(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(rows))


def _plan(model: type[nn.Module], gb_per_s: float, **options: object) -> Plan:
    x = torch.zeros(512, dtype=torch.long) if model is _Looked else 64
    return explained(model, 4, hardware(link=gb_per_s), x, **options)


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
        bound = lower_bound(plan)
        assert 0 < bound.time_us <= plan.step_us
        assert 0 < bound.sent_bytes <= plan.volume.total_bytes


@pytest.mark.parametrize("model", [Broken, Partial])
def test_graph_breaks_and_what_is_frozen_or_not_read(model: type[nn.Module]) -> None:
    plan = _plan(model, 0.05)
    bound = lower_bound(plan)
    assert 0.6 < bound.time_us / plan.step_us <= 1
    assert 0.6 < bound.sent_bytes / plan.volume.total_bytes <= 1


def test_bytes_are_those_of_the_shapes() -> None:
    """Biases are not needed in backward; what a plan holds in forward need not be gathered again."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    bound = lower_bound(explained(Stack, 4, mp_policy=policy, bucket_mb=0))
    matrix, block = WIDTH * WIDTH, WIDTH * WIDTH + 2 * WIDTH
    assert 2 * matrix < bound.room_bytes < 3 * 2 * block
    again = max(0, 2 * 3 * (matrix + WIDTH) - bound.room_bytes)
    assert bound.sent_bytes == pytest.approx(((2 + 4) * 3 * block + again) * 3 / 4, rel=0.01)


def test_replicas_have_a_link_of_their_own() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        plan = explained(Stack, None, hardware(link=0.05), mesh=mesh)
    bound = lower_bound(plan)
    assert 0.6 < bound.sent_bytes / plan.volume.total_bytes <= 1
    assert 0 < bound.time_us <= plan.step_us


def test_what_hides_behind_nothing_is_in_it() -> None:
    """At first the table must come, at last its gradient must go; a floor of computing alone says nothing of either."""
    plan = _plan(_Looked, 1.0)
    table_us = 16 * WIDTH * WIDTH * 4 * 3 / 4 / 1e3 / 0.9  # 0.9 of 1 GB/s
    bound_us = lower_bound(plan).time_us
    assert bound_us > sum(graph.compute_us for graph in plan.forward) + 2 * table_us
    assert lower_bound(_plan(_Looked, 1.0, embedding="sharded")).time_us < bound_us


def test_more_memory_lowers_it() -> None:
    sent = [lower_bound(_plan(Stack, 0.05, prefetch=distance)).sent_bytes for distance in (0, 1, 3)]
    assert sent == sorted(sent, reverse=True)
    assert sent[0] > sent[-1]


@long.parametrize("gather", [torch.int8, "nvfp4"], always=["nvfp4"])
def test_fewer_bits_are_counted_as_they_are_sent(gather: torch.dtype | str) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, gather_dtype=gather)
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context:
            plan = _plan(Stack, 0.05, mp_policy=policy, prefetch=0)
        bound = lower_bound(plan)
        assert 0.6 < bound.sent_bytes / plan.volume.total_bytes <= 1
        assert 0 < bound.time_us <= plan.step_us
    for reshard in (True, 2):
        volume = _plan(Stack, 0.05, mp_policy=policy, reshard_after_forward=reshard).volume
        assert 0.95 < volume.full_sharding_bytes / volume.total_bytes < 1.05
