"""Units that share collectives, and large parameters as messages of their own or packed: the numbers stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compile import explain, fully_shard
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import Hardware, Quantity, hardware
from fsdp_compile.explain.plan import Plan
from tests.models.kinds import WIDTH, Slim, Stack, Tied
from tests.numerics.one_process.measure import Differences, Prepare, batches, train_pair
from tests.numerics.one_process.test_model_kinds import assert_equal_training
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import loss_of


def _trained(bucket_mb: float) -> list[torch.Tensor]:
    """Losses and this rank's parameters after two steps."""
    torch._dynamo.reset()  # both compile the same code
    torch.manual_seed(0)
    model = Slim()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"lower": "eager", "bucket_mb": bucket_mb}
    compiled = torch.compile(model, backend="fsdp", options=options)
    losses = []
    for batch in batches(2, 4):
        loss = loss_of(compiled(batch.chunk(2)[dist.get_rank()]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = [p.to_local().detach().clone() for p in model.parameters() if isinstance(p, DTensor)]
    assert parameters
    return [*losses, *parameters]


@pytest.mark.core
@on_ranks()
def test_sharing_collectives_changes_no_bit_on_two_ranks() -> None:
    assert all(map(torch.equal, _trained(0), _trained(10)))


def _with_buckets_chosen(make: Callable[[], torch.nn.Module], prepare: Prepare | None) -> Differences:
    return train_pair(make, prepare=prepare, options={"bucket_mb": "auto"})


def _keep_for_backward(model: torch.nn.Module) -> None:
    fully_shard(model, reshard_after_forward=False)


@pytest.mark.long
@pytest.mark.core
@pytest.mark.parametrize(("make", "prepare"), [(Tied, None), (Stack, _keep_for_backward)], ids=["tied", "kept"])
def test_sharing_collectives_changes_no_number(make: Callable[[], torch.nn.Module], prepare: Prepare | None) -> None:
    assert_equal_training(run_ranks(_with_buckets_chosen, make, prepare))


def _hybrid() -> Differences:
    def shard(model: torch.nn.Module) -> None:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))

    return train_pair(Slim, prepare=shard, options={"bucket_mb": 10}, clip=0.5)


@pytest.mark.long
def test_replicas_average_what_units_share() -> None:
    assert_equal_training(run_ranks(_hybrid, world_size=4))


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


def _hardware(message_us: float) -> Hardware:
    cpu = hardware("cpu", 10.0)
    return dataclasses.replace(cpu, link=dataclasses.replace(cpu.link, message=Quantity(message_us, "us", "a test's")))


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


def _trained_of_layouts(message_us: float) -> tuple[Differences, Messages]:
    models: list[nn.Module] = []
    options = {"hardware": _hardware(message_us), "bucket_mb": 0}
    found = train_pair(_wide, prepare=lambda model: models.append(fully_shard(model)), options=options)
    return found, _messages(explain(models[0]))


def _both() -> list[tuple[Differences, Messages]]:
    return [_trained_of_layouts(message_us) for message_us in (0.0, 1e6)]


@pytest.mark.core
def test_each_layout_is_taken_where_it_is_cheaper_and_changes_no_number() -> None:
    ranks = run_ranks(_both)
    for layout in zip(*ranks, strict=True):
        assert_equal_training([found for found, _ in layout])
    apart, packed = (messages for _, messages in ranks[0])
    for kind in (Kind.GATHER, Kind.REDUCE):
        assert 1 in apart[kind]
        assert 1 not in packed[kind]
