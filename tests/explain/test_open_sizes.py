"""Batch and sequence as symbols: one trace answers for every size, as a trace at that size would."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdp_compile.cost.hardware import hardware
from fsdp_compile.cost.memory import Holder
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.training.model import Llama, ModelShape

SHAPE = ModelShape(width=256, layers=1, heads=4, seq_len=64)
LINK = hardware(link=50.0)
OPEN = {"batch": 0, "sequence": 1}
RANKS = 8


def _explain(batch: int, sequence: int, dims: Any = None, *, world_size: int = RANKS, **options: Any) -> Plan:
    with torch.device("meta"):
        model, tokens = Llama(SHAPE), torch.zeros(batch, sequence, dtype=torch.long)
    return explain(
        model, tokens, world_size=world_size, options={"lower": "eager", **options}, dims=dims, hardware=LINK
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return _explain(4, 64, OPEN)


def _seen(plan: Plan) -> list[tuple[object, ...]]:
    """What a plan says, without names of nodes: those of sizes are counted where there are any."""
    return [
        (
            [(c.kind, c.parameters, c.size_bytes, c.start.index, c.exposure, c.issued_us) for c in g.collectives],
            (g.nodes, g.flops, g.compute_us, g.exposed_us, g.end_us),
            (g.memory.peak_bytes, g.memory.at_peak, g.memory.live_bytes),
        )
        for g in plan.graphs
    ]


@pytest.mark.long
@pytest.mark.core
def test_a_plan_of_another_size_is_the_one_of_a_trace_at_that_size(plan: Plan) -> None:
    assert _seen(plan) == _seen(_explain(4, 64))
    trace = importlib.import_module("fsdp_compile.explain.api")
    with mock.patch.object(trace, "trace", side_effect=AssertionError):  # nothing is traced again
        there = plan.at(batch=16, sequence=32)
    assert there.sizes == {"batch": 16, "sequence": 32}
    assert _seen(there) == _seen(_explain(16, 32))


@pytest.mark.long
def test_ranks_and_sizes_change_together_and_back(plan: Plan) -> None:
    there = plan.at(world_size=2, batch=1, gb_per_s=3.0)
    alone = _explain(1, 64, world_size=2).at(gb_per_s=3.0)
    assert [g.flops for g in there.graphs] == [g.flops for g in alone.graphs]
    assert there.peak_bytes == alone.peak_bytes
    assert there.at(world_size=RANKS, batch=4, gb_per_s=50.0) == plan


@pytest.mark.long
def test_a_size_of_one_is_open_as_any_other(plan: Plan) -> None:
    alone = _explain(1, 64, OPEN)
    assert alone.sizes == {"batch": 1, "sequence": 64}
    assert _seen(alone.at(batch=4)) == _seen(plan)


@pytest.mark.core
def test_memory_and_work_grow_with_the_tokens(plan: Plan) -> None:
    there = plan.at(batch=8)
    for here, larger in zip(plan.graphs, there.graphs, strict=True):
        assert larger.flops == 2 * here.flops
    saved = [one.forward[0].memory.live_bytes[Holder.SAVED][-1] for one in (plan, there)]
    assert saved[1] == 2 * saved[0]
    assert there.volume == plan.volume


@pytest.mark.long
def test_names_and_dimensions_are_checked(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="no size 'heads'"):
        _explain(4, 64, {"heads": 2})
    with pytest.raises(ConfigError, match="sequence is no size at all"):
        _explain(4, 64, {"sequence": 5})
    with pytest.raises(ConfigError, match="has 2 dimensions"):
        _explain(4, 64, {"batch": {"tokens": 2}})
    with pytest.raises(ConfigError, match="batch cannot be 0"):
        plan.at(batch=0)
    with pytest.raises(ConfigError, match=r"was a number(?s:.*)dims=\{\"batch\": 0\}"):
        _explain(4, 64, {"sequence": 1}).at(batch=8)


def test_a_size_beyond_what_the_model_can_do_names_the_line(plan: Plan) -> None:
    with pytest.raises(ConfigError, match=r"sequence <= 64(?s:.*)self\.cos\[:length\]"):
        plan.at(sequence=65)


class Fixed(nn.Module):
    """Its view fixes the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(x) if mask is None else self.linear(x) * mask
        return y.view(6, 5, -1)


class Even(Fixed):
    """Halves the batch."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        return self.linear(x).view(2, -1, 8)


class Broken(Fixed):
    """Two regions."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(x)


def _small(model: nn.Module, dims: Any, **kwargs: Any) -> Plan:
    return explain(model, torch.zeros(6, 5, 8), world_size=2, options={"lower": "eager"}, dims=dims, **kwargs)


@pytest.mark.core
def test_a_model_for_one_size_is_refused_with_the_line_that_fixes_it() -> None:
    with pytest.raises(UnsupportedModelError, match=r"batch is fixed to 6(?s:.*)y\.view\(6, 5, -1\)"):
        _small(Fixed(), {"batch": 0})
    with pytest.raises(UnsupportedModelError, match="graph breaks split the model into 2 regions"):
        _small(Broken(), {"batch": 0})


def test_a_size_that_the_graph_does_not_take_is_refused_with_the_line() -> None:
    plan = _small(Even(), {"batch": {"x": 0}})
    assert plan.at(batch=8).sizes == {"batch": 8}
    with pytest.raises(ConfigError, match=r"batch=7 does not meet(?s:.*)view\(2, -1, 8\)"):
        plan.at(batch=7)


def test_two_sizes_of_one_name_are_refused_unless_arguments_are_named() -> None:
    mask = torch.ones(1, 1, 8)
    with pytest.raises(ConfigError, match="batch is 6 in x, 1 in mask"):
        _small(Fixed(), {"batch": 0}, mask=mask)
    with pytest.raises(UnsupportedModelError, match="sequence is fixed to 5"):
        _small(Fixed(), {"sequence": {"x": 1}}, mask=mask)
