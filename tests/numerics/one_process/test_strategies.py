"""Every strategy trains to the numbers of one process on the whole batch, and moves the bytes that it promises."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable

import pytest
import torch
from torch import fx
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fsdp_compile import fully_shard, no_sync
from fsdp_compile.cost.communicate import Kind, communication
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.ir.graph import Phase, Role, require, role_of
from fsdp_compile.ir.text.printer import format_graph
from fsdp_compile.verify.check import complaints
from tests import long
from tests.models.graphs import MODELS
from tests.models.kinds import Checkpointed, Frozen, OddShapes, Slim, Stack, Tied
from tests.models.unusual import SeveralDtypes
from tests.numerics.one_process.measure import (
    LEARNING_RATE,
    Differences,
    adamw_with_eps,
    assert_equal_training,
    gradient_difference,
    parameter_difference,
    relative,
    train_pair,
)
from tests.numerics.one_process.strategies import PRECISIONS, STRATEGIES
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess, mean_over_ranks
from tests.verify.captured import World
from tests.verify.graphs import graph

BOUNDS = {"fp32": Differences(1e-6, 1e-5, 1e-3), "bf16": Differences(3e-2, 1e-1, math.inf)}
"""Sums of float32 in another order, and 2^-8 per rounding of bfloat16."""
PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    **dict.fromkeys(("full", "grad-op", "integer"), (Shard(0),)),
    **dict.fromkeys(("no-shard", "hybrid", "hybrid-zero2", "hybrid-of-one"), (Replicate(), Shard(0))),
}

KINDS = ("one batch", "no_sync", "sharded")
"""What a step accumulates: nothing, gradients that wait in full, gradients that were reduced."""


def _step(pair: WithOneProcess, kind: str, placements: tuple[Placement, ...]) -> Differences:
    found, parts = Differences(), 1 if kind == "one batch" else 2
    for part in range(parts):
        with no_sync(pair.model) if kind == "no_sync" and part == 0 else contextlib.nullcontext():
            mine, theirs = pair.losses()
            mine.backward()
        theirs.backward()
        found.loss = max(found.loss, relative(mean_over_ranks(mine), theirs.detach()))
    found.gradient = gradient_difference(*pair)
    for parameter in pair.model.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == placements
    pair.update()
    found.parameter = parameter_difference(*pair) / LEARNING_RATE
    return found


CASES = [
    (precision, strategy, world_size)
    for world_size, same in ((2, {"integer", "hybrid"}), (4, set()))  # on two ranks, as "full" and "hybrid-of-one"
    for precision, strategy in itertools.product(PRECISIONS, STRATEGIES)
    if strategy not in same
]
ALWAYS = [("fp32", "no-shard", 2), ("bf16", "hybrid-of-one", 2)]


@pytest.mark.core
@long.parametrize(("precision", "strategy", "world_size"), CASES, always=ALWAYS)
@on_ranks(world_size=lambda world_size, **_: world_size)
def test_every_strategy_equals_one_process(precision: str, strategy: str, world_size: int) -> None:
    """Gradients are averages over all ranks, whether a rank shares them with a group, with replicas or with both."""
    with torch._dynamo.config.patch(recompile_limit=100, fail_on_recompile_limit_hit=True):
        shard = functools.partial(fully_shard, **STRATEGIES[strategy](), mp_policy=PRECISIONS[precision])
        pair = WithOneProcess(Slim, shard=shard, optimizer=adamw_with_eps, shape=32, rows=4, twice=False)
        for kind in KINDS:
            assert_equal_training([_step(pair, kind, PLACEMENTS[strategy])], BOUNDS[precision])


def _bytes(nodes: Iterable[fx.Node]) -> int:
    """Of the messages that collectives send."""
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for start in nodes for n in start.all_input_nodes)


@pytest.mark.core
@pytest.mark.parametrize("replicas", [2, 4])
def test_hybrid_sharding_reduces_inside_the_group_and_averages_only_the_shard(replicas: int) -> None:
    """A ring sends (F-1)/F of the gradient inside a group of F, and 2 (R-1)/R of 1/F of it over R replicas."""
    group = 16 // replicas
    step = graph(Phase.BACKWARD, world=World(16, replicas=replicas))
    scatters, averages = list(step.nodes(Role.REDUCE)), list(step.nodes(Role.REPLICATE))
    gradient = _bytes(scatters)
    parameters = 4 * sum(p.numel() for p in MODELS["stack"][0]().parameters())
    assert parameters <= gradient < 1.1 * parameters, "alignment is all that is added"
    assert {node.args[-2] for node in scatters} == {group}
    assert _bytes(averages) * group == gradient
    sent = dict.fromkeys(Kind, 0.0)
    for node in (*scatters, *averages):
        moved = communication(node, hardware())
        sent[moved.kind] += moved.sent_bytes
    assert sent[Kind.REDUCE] == gradient * (group - 1) / group
    assert sent[Kind.REPLICATE] == pytest.approx(2 * (replicas - 1) / replicas * gradient / group)
    assert len(scatters) == len(averages) == 3, "one of each per unit"


@pytest.mark.core
def test_backward_gathers_a_kept_parameter_over_fewer_ranks() -> None:
    """Forward saves 1/k of each parameter on each rank; backward gathers that over k ranks, and reduces over all."""
    world = World(8, reshard_after_forward=2)
    forward, backward = graph(Phase.FORWARD, world=world), graph(Phase.BACKWARD, world=world)
    assert {node.args[1:] for node in forward.nodes(Role.GATHER)} == {(8, "fsdp.shard.0")}
    # FSDP2 makes a mesh of neighbours for each unit.
    over = {node.args[1:] for node in backward.nodes(Role.GATHER)}
    assert over == {(2, f"fsdp.post_forward.{number}") for number in range(len(over))}
    assert {node.args[2:] for node in backward.nodes(Role.REDUCE)} == {(8, "fsdp.shard.0")}
    kept = [node for node in backward.nodes(Role.POST_FORWARD_SHARD) if node.op == "placeholder"]
    for node in kept:
        (spec,) = require(node).specs
        assert node.meta["val"].numel() == 8 * spec.extent // 2
        assert [spec.shape] != node.meta["val"].shape, "no parameter is saved whole"
    assert {require(node).parameters[0] for node in kept} == {
        name for name, _ in MODELS["stack"][0]().named_parameters() if "norm" in name or name.endswith("weight")
    }, "those whose values gradients need"
    full = forward.output.all_input_nodes
    assert not [node for node in full if role_of(node) in (Role.FULL, Role.GATHER_WAIT)]
    whole = graph(Phase.BACKWARD, world=World(8))
    sent = [
        sum(communication(node, hardware()).sent_bytes for node in step.nodes(Role.GATHER))
        for step in (backward, whole)
    ]
    assert sent[0] < 0.6 * sent[1], "1/2 instead of 7/8"


@pytest.mark.long
def test_every_mesh_with_integer_reshard_is_verified() -> None:
    for model in ("tied", "uneven", "partial"):
        for world in (World(4, reshard_after_forward=2), World(8, replicas=2, reshard_after_forward=2)):
            for phase in Phase:
                assert complaints(graph(phase, model=model, world=world)) == []


@pytest.mark.long
@pytest.mark.core
@on_ranks(world_size=4)
def test_kept_parameters_train_as_in_one_process() -> None:
    """Padding, tied and frozen parameters, recomputation, several dtypes in one unit."""
    for make in (OddShapes, Tied, Frozen, Checkpointed, SeveralDtypes):
        prepare = functools.partial(fully_shard, reshard_after_forward=2)
        train_pair(make, prepare=prepare, steps=2, within=Differences(1e-6, 2e-5, math.inf))


def test_replicas_alone_gather_nothing_and_average_each_unit_at_once() -> None:
    world = World(8, strategy=ShardingStrategy.NO_SHARD)
    forward, backward = graph(Phase.FORWARD, world=world), graph(Phase.BACKWARD, world=world)
    assert not list(forward.nodes(Role.GATHER)) + list(backward.nodes(Role.GATHER, Role.REDUCE))
    averages = list(backward.nodes(Role.REPLICATE))
    assert [require(node).unit for node in averages] == ["blocks.2", "blocks.1", "blocks.0"]
    parameters = 4 * sum(p.numel() for p in MODELS["stack"][0]().parameters())
    assert parameters <= _bytes(averages) < 1.1 * parameters


@pytest.mark.long
@pytest.mark.parametrize("world", [World(8, replicas=2), World(8, strategy=ShardingStrategy.NO_SHARD)])
def test_every_rank_issues_the_same_collectives_in_the_same_order(world: World) -> None:
    first = graph(Phase.BACKWARD, world=world)
    other = graph(Phase.BACKWARD, world=dataclasses.replace(world, rank=5))
    assert format_graph(first) == format_graph(other)


@pytest.mark.long
@on_ranks(world_size=4)
def test_parameters_and_state_dicts_are_placed_as_the_strategy_says() -> None:
    for name in STRATEGIES:
        torch.manual_seed(0)
        model = Stack(1)
        full = {key: value.clone() for key, value in model.state_dict().items()}
        fully_shard(model, **STRATEGIES[name]())
        for key, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert tuple(parameter.placements) == PLACEMENTS[name]
            again = distribute_tensor(full[key], parameter.device_mesh, parameter.placements, src_data_rank=None)
            assert torch.equal(parameter.to_local(), again.to_local()), key
        state = {key: value + 1 for key, value in model.state_dict().items()}
        model.load_state_dict(state)
        for key, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), full[key] + 1), key
