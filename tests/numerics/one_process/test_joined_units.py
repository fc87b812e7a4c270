"""Units that share collectives, messages of several parameters, and a group of its own for reductions: numbers stay."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile import explain, fully_shard, units
from fsdp_compile._torch.distributed import resolve_group
from fsdp_compile.comm.groups import rank_store
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import Quantity, hardware
from fsdp_compile.explain.plan import Plan
from tests.models.kinds import WIDTH, Slim, Stack
from tests.models.round_sizes import Stack as Wide
from tests.models.round_sizes import on_meta
from tests.numerics.one_process.measure import batches, train_pair
from tests.ranks import on_ranks
from tests.two_sides import WithFsdp2, compile_eagerly, mesh_of, shard_blocks, share


@pytest.mark.core
@on_ranks()
def test_sharing_collectives_changes_no_bit_on_two_ranks() -> None:
    pair = WithFsdp2(Slim, shard_blocks, lambda step: share(batches(1, 4, seed=step)[0]))
    pair.compiled(fullgraph=False, bucket_mb=10)
    pair.train()


@pytest.mark.long
@on_ranks(world_size=4)
def test_replicas_average_what_units_share() -> None:
    prepare = functools.partial(fully_shard, mesh=mesh_of((2, 2)))
    train_pair(Slim, prepare=prepare, options={"bucket_mb": 10}, clip=0.5)


def _collectives(options: dict[str, Any]) -> tuple[list[int], set[str]]:
    """Collectives in forward and in backward of a stack of tiny blocks, and all units that they serve."""
    plan = explain(Stack(6), torch.zeros(2, WIDTH), world_size=8, options={"lower": "eager", **options})
    served = {unit for graph in plan.graphs for one in graph.collectives for unit in one.units}
    return [len(graph.collectives) for graph in plan.graphs], served


@pytest.mark.long
@pytest.mark.core
def test_tiny_units_share_collectives_by_default_and_the_report_says_so() -> None:
    apart, units = _collectives({"bucket_mb": 0})
    shared, served = _collectives({})
    assert len(units) >= 6
    assert served == units
    assert shared == [1, 2], "a gather in forward; one and a reduction in backward"
    assert apart == [len(units), 2 * len(units)]
    assert _collectives({"prefetch": 1})[0] == apart, "a fixed distance counts units"


Messages = dict[Kind, set[int]]
"""For each kind of collective, where a unit has several parameters: how many its messages hold."""


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, WIDTH))


def _messages(plan: Plan) -> Messages:
    found: Messages = {}
    for graph in plan.graphs:
        for collective in graph.collectives:
            messages = [len(message.parameters) for message in collective.messages]
            if sum(messages) > 1:  # backward gathers weights, and no biases
                found.setdefault(collective.kind, set()).update(messages)
    return found


@pytest.mark.core
@on_ranks()
def test_each_layout_is_taken_where_it_is_cheaper_and_changes_no_number() -> None:
    cpu = hardware("cpu", 10.0)
    for message_us, is_apart in ((0.0, True), (1e6, False)):
        models: list[nn.Module] = []
        link = dataclasses.replace(cpu.link, message=Quantity(message_us, "us", "a test's"))
        options = {"hardware": dataclasses.replace(cpu, link=link), "bucket_mb": 0}
        train_pair(_wide, prepare=lambda model: models.append(fully_shard(model)), options=options)  # noqa: B023
        found = _messages(explain(models[0]))
        assert all((1 in found[kind]) == is_apart for kind in (Kind.GATHER, Kind.REDUCE))


# A group of its own for reductions.


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
