"""Gradients that are reduced on a process group of their own: the same numbers, the same names on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import explain, fully_shard, units
from fsdp_compile._torch.distributed import resolve_group
from fsdp_compile.comm.groups import rank_store
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.explain.plan import Plan
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Slim, Stack
from tests.models.round_sizes import Stack as Wide
from tests.models.round_sizes import on_meta
from tests.numerics.one_process.measure import Differences, train_pair
from tests.numerics.one_process.test_model_kinds import assert_equal_training
from tests.ranks import run_ranks


def _groups(plan: Plan) -> dict[Kind, set[str]]:
    found: dict[Kind, set[str]] = {}
    for graph in plan.graphs:
        for collective in graph.collectives:
            found.setdefault(collective.kind, set()).add(collective.group)
    return found


@dataclasses.dataclass(frozen=True)
class _Trained:
    differences: Differences
    groups: dict[Kind, set[str]]
    is_apart: bool
    agrees: bool


def _trained(shape: tuple[int, ...], prefetch: object) -> _Trained:
    models: list[Any] = []

    def prepare(model: Any) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        fully_shard(model, mesh=mesh, separate_reduce_group=True)
        models.append(model)

    found = train_pair(Slim, prepare=prepare, options={"prefetch": prefetch})
    groups = _groups(explain(models[0]))
    (gathers,), (reduces,) = groups[Kind.GATHER], groups[Kind.REDUCE]
    is_apart = resolve_group(gathers) is not resolve_group(reduces)
    return _Trained(found, groups, is_apart, rank_store(reduces) is not None)


def _both() -> list[_Trained]:
    return [_trained((4,), "auto"), _trained((2, 2), 1)]


@pytest.mark.long
@pytest.mark.core
def test_two_groups_train_to_the_numbers_of_one_process_under_names_that_all_ranks_share() -> None:
    for ranks in zip(*run_ranks(_both, world_size=4), strict=True):
        assert_equal_training([rank.differences for rank in ranks])
        assert all(rank.is_apart and rank.agrees for rank in ranks)
        assert all(rank.groups == ranks[0].groups for rank in ranks)
        (name,) = ranks[0].groups[Kind.REDUCE]
        assert name.startswith("fsdp.reduce.")


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def _reduced_over(model: Any) -> set[str]:
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    compiled(torch.ones(4, WIDTH)).sum().backward()
    return _groups(explain(model))[Kind.REDUCE]


@pytest.mark.usefixtures("world")
def test_fsdp2s_method_switches_between_two_groups_that_are_made_once() -> None:
    model: Any = Stack()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    assert _reduced_over(model) == {"fsdp.shard.0"}
    model.set_separate_reduce_scatter_group()
    assert _reduced_over(model) == {"fsdp.reduce.0"}
    model.blocks[0].set_separate_reduce_scatter_group(enable=False)
    assert _reduced_over(model) == {"fsdp.reduce.0", "fsdp.shard.0"}
    model.set_separate_reduce_scatter_group(enable=False)
    specs = [param.spec for unit in units(model) for group in unit.groups for param in group.params]
    assert {spec.scatter_group for spec in specs} == {"fsdp.shard.0"}


def test_a_plan_shows_two_queues_of_one_link() -> None:
    model, x = on_meta(Wide)
    plans = [
        explain(model, x, world_size=8, options={"lower": "eager", "prefetch": 1, "separate_reduce_group": apart})
        for apart in (False, True)
    ]
    shared, apart = plans
    assert _groups(shared)[Kind.REDUCE] == {"fsdp.shard.0"}
    assert _groups(apart)[Kind.REDUCE] == {"fsdp.reduce.0"}
    # The same work for the link, whatever the queues.
    assert apart.busy_us == pytest.approx(shared.busy_us)
    assert apart.step_us >= apart.busy_us
