"""Large parameters as messages of their own, or packed: by cost, with the numbers of one process either way."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from fsdp_compile import explain, fully_shard
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.cost.hardware import Hardware, Quantity, hardware
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.report import Layout
from tests.models.kinds import WIDTH
from tests.numerics.one_process.measure import Differences, train_pair
from tests.numerics.one_process.test_model_kinds import assert_equal_training
from tests.ranks import run_ranks

Messages = dict[Kind, set[tuple[Layout, int]]]
"""For each kind of collective, where a unit has several parameters: layouts of messages and how many they hold."""


def _hardware(message_us: float) -> Hardware:
    cpu = hardware("cpu", 10.0)
    return dataclasses.replace(cpu, link=dataclasses.replace(cpu.link, message=Quantity(message_us, "us", "a test's")))


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, WIDTH))


def _messages(plan: Plan) -> Messages:
    found: Messages = {}
    for graph in plan.graphs:
        for collective in graph.collectives:
            messages = [(message.layout, len(message.parameters)) for message in collective.messages]
            if sum(count for _, count in messages) > 1:  # backward gathers weights, and no biases
                found.setdefault(collective.kind, set()).update(messages)
    return found


def _trained(message_us: float) -> tuple[Differences, Messages]:
    models: list[nn.Module] = []
    options = {"hardware": _hardware(message_us), "bucket_mb": 0}
    found = train_pair(_wide, prepare=lambda model: models.append(fully_shard(model)), options=options)
    return found, _messages(explain(models[0]))


def _both() -> list[tuple[Differences, Messages]]:
    return [_trained(message_us) for message_us in (0.0, 1e6)]


@pytest.mark.core
def test_each_layout_is_taken_where_it_is_cheaper_and_changes_no_number() -> None:
    ranks = run_ranks(_both)
    for layout in zip(*ranks, strict=True):
        assert_equal_training([found for found, _ in layout])
    apart, packed = (messages for _, messages in ranks[0])
    for kind in (Kind.GATHER, Kind.REDUCE):
        assert (Layout.OWN, 1) in apart[kind]
        assert {layout for layout, _ in packed[kind]} == {Layout.PACKED}
