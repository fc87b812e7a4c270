"""A step of Inductor's code keeps the least budget that is accepted, and needs what was predicted, not less."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks import models
from benchmarks.contenders import OURS, Setup
from benchmarks.hardware import plan_of, told
from benchmarks.memory import ROOMIER, least_budget_bytes
from benchmarks.models import LlamaSize, Task
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes
from benchmarks.steps import forget_compiles, prepare

RANKS = 8
WIDTH = 64
# As large as the benchmarks' to each other: the table, a block's parameters and the logits.
LLAMA = LlamaSize(layers=3, width=128, hidden=352, heads=2, key_heads=2, vocabulary=1536, batch=2, tokens=32)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16 * WIDTH, bias=False)
        self.down = nn.Linear(16 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x.sin()).relu())


class _Words(nn.Module):
    """What is taken out of its table, which is as large as a block, is read before a block and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32 * WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(4)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.table(ids))


def _words() -> Task:
    ids = torch.arange(16)
    return Task(_Words, _Block, lambda model: model(ids), lambda out: out.square().sum(), ((ids,), {}))


def _assert_kept(task: Task, room: float) -> None:
    setup = told(Setup(task.block), bytes_per_s=0.2e9, latency_us=50.0)  # so slow that all of a budget is used
    with emulated_world(RANKS, Network(Link(bytes_per_s=1e15))):
        budget_bytes = round(room * least_budget_bytes(task, setup, RANKS))
        within = dataclasses.replace(setup, options={**setup.options, "memory_budget_gb": budget_bytes / 1e9})
        predicted_bytes = plan_of(task, within, RANKS).peak_bytes
        forget_compiles()
        ready, failed = prepare([OURS], task, within)
        assert not failed
        prepared = ready[OURS.name]
        prepared.model.zero_grad(set_to_none=True)
        peak_bytes = measured_peak_bytes(prepared.model, task.inputs, prepared.step, "cpu")
    assert peak_bytes <= budget_bytes
    assert peak_bytes == pytest.approx(predicted_bytes, rel=0.02)


@pytest.mark.long
@pytest.mark.inductor
def test_a_table_is_freed_once_rows_are_taken_out_of_it() -> None:
    task = _words()
    setup = told(Setup(task.block), bytes_per_s=0.2e9, latency_us=50.0)
    with emulated_world(RANKS, Network(Link(bytes_per_s=1e15))), torch.no_grad():
        with torch.enable_grad():
            budget_bytes = least_budget_bytes(task, setup, RANKS)
        within = dataclasses.replace(setup, options={**setup.options, "memory_budget_gb": budget_bytes / 1e9})
        forget_compiles()
        model = task.make()
        called = OURS.prepare(model, within)
        task.forward(called)
        peak_bytes = measured_peak_bytes(model, task.inputs, lambda: task.forward(called), "cpu")
    assert 0.8 * budget_bytes < peak_bytes <= budget_bytes


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("room", [1.0, ROOMIER])
def test_budgets_of_a_llama_are_kept(room: float) -> None:
    _assert_kept(models.llama(LLAMA), room)
