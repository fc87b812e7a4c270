"""A step of Inductor's code keeps the least budget that is accepted, and needs what was predicted, not less."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import models
from benchmarks.contenders import OURS, Setup
from benchmarks.hardware import plan_of, told
from benchmarks.memory import ROOMIER, least_budget_bytes
from benchmarks.models import LlamaSize
from benchmarks.network.emulated import Network, emulated_world
from benchmarks.network.wire import Link
from benchmarks.peak import measured_peak_bytes
from benchmarks.steps import forget_compiles, prepare
from tests import long

RANKS = 8
# A table as large as two blocks: it is most of the memory wherever it is gathered.
WORDY = LlamaSize(layers=2, width=128, hidden=256, heads=2, key_heads=2, vocabulary=2048, batch=2, tokens=32)


@pytest.mark.inductor
@long.parametrize("room", [1.0, ROOMIER], always=[1.0])
def test_the_least_budget_of_a_llama_is_kept(room: float) -> None:
    task = models.llama(WORDY)
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
