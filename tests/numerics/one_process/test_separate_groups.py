"""Gradients that are reduced on a process group of their own: the same numbers, the same names on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import explain, fully_shard, units
from fsdp_compile._torch.distributed import resolve_group
from fsdp_compile.comm.groups import rank_store
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.explain.plan import Plan
from tests.fake_world import fake_world
from tests.models.kinds import WIDTH, Slim, Stack
from tests.models.round_sizes import Stack as Wide
from tests.models.round_sizes import on_meta
from tests.numerics.one_process.measure import train_pair
from tests.ranks import on_ranks
from tests.two_sides import compile_eagerly, mesh_of, shard_blocks


def _groups(plan: Plan) -> dict[Kind, set[str]]:
    found: dict[Kind, set[str]] = {}
    for graph in plan.graphs:
        for collective in graph.collectives:
            found.setdefault(collective.kind, set()).add(collective.group)
    return found


@pytest.mark.long
@pytest.mark.core
@on_ranks(world_size=4)
def test_two_groups_train_to_the_numbers_of_one_process_under_names_that_all_ranks_share() -> None:
    given: list[tuple[tuple[int, ...], object]] = [((4,), "auto"), ((2, 2), 1)]
    for shape, prefetch in given:
        models: list[Any] = []

        def prepare(model: Any) -> None:
            models.append(fully_shard(model, mesh=mesh_of(shape), separate_reduce_group=True))  # noqa: B023  runs at once

        train_pair(Slim, prepare=prepare, options={"prefetch": prefetch})
        groups = _groups(explain(models[0]))
        (gathers,), (reduces,) = groups[Kind.GATHER], groups[Kind.REDUCE]
        assert resolve_group(gathers) is not resolve_group(reduces)
        assert rank_store(reduces) is not None
        assert reduces.startswith("fsdp.reduce.")
        everywhere: list[Any] = [None] * 4
        dist.all_gather_object(everywhere, groups)
        assert everywhere == [groups] * 4


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def _reduced_over(model: Any) -> set[str]:
    compile_eagerly(model)(torch.ones(4, WIDTH)).sum().backward()
    return _groups(explain(model))[Kind.REDUCE]


@pytest.mark.usefixtures("world")
def test_fsdp2s_method_switches_between_two_groups_that_are_made_once() -> None:
    model = shard_blocks(Stack())
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
