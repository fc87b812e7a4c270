"""The batch as a symbol: one trace answers for every size, as a trace at that size would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compile.cost.hardware import hardware
from fsdp_compile.cost.memory import Holder
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.explain.api import traced_model
from fsdp_compile.explain.open_batch import hollow_inputs
from fsdp_compile.explain.plan import Plan
from fsdp_compile.explain.rescale import Traced
from fsdp_compile.explain.stand_in import planning_world
from fsdp_compile.options import FSDPOptions
from fsdp_compile.training.model import Llama, ModelShape

LINK = hardware(link=50.0)
EAGER = FSDPOptions(lower="eager")


def _traced(model: nn.Module, *args: Any, open_batch: bool = True, **kwargs: Any) -> Traced:
    with planning_world(8) as ranks:
        return traced_model(model, hollow_inputs(args, kwargs, open_batch=open_batch), ranks, EAGER, recomputed=0)


def _llama(batch: int, *, open_batch: bool = True) -> Traced:
    with torch.device("meta"):
        model = Llama(ModelShape(width=256, layers=1, heads=4, seq_len=64))
        tokens = torch.zeros(batch, 64, dtype=torch.long)
    return _traced(model, tokens, open_batch=open_batch)


def _at(traced: Traced, batch: int | None) -> Plan:
    steps, units = traced.resharded(None, batch, LINK, EAGER)
    return traced.plan(steps, units, 8, LINK)


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


@pytest.fixture(scope="module")
def opened() -> Traced:
    return _llama(4)


@pytest.mark.long
@pytest.mark.core
def test_a_plan_of_another_size_is_the_one_of_a_trace_at_that_size(opened: Traced) -> None:
    for batch in (4, 16):
        assert _seen(_at(opened, batch)) == _seen(_at(_llama(batch, open_batch=False), None))
    there, alone = _at(opened, 1), _at(_llama(1, open_batch=False), None)
    assert [graph.flops for graph in there.graphs] == [graph.flops for graph in alone.graphs]
    assert there.peak_bytes == alone.peak_bytes
    assert _seen(_at(_llama(1), 4)) == _seen(_at(opened, 4))  # an open size of one is traced larger


@pytest.mark.core
def test_memory_and_work_grow_with_the_samples(opened: Traced) -> None:
    few, more = _at(opened, 4), _at(opened, 8)
    for here, larger in zip(few.graphs, more.graphs, strict=True):
        assert larger.flops == 2 * here.flops
    saved = [one.forward[0].memory.live_bytes[Holder.SAVED][-1] for one in (few, more)]
    assert saved[1] == 2 * saved[0]
    assert more.volume == few.volume


class Viewed(nn.Module):
    """Its view may fix the batch, and its forward may have a graph break."""

    def __init__(self, *shape: int, breaks: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.shape = shape
        self.breaks = breaks

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(x) if mask is None else self.linear(x) * mask
        if self.breaks:
            torch._dynamo.graph_break()
            y = self.linear(y)
        return y.view(self.shape)


@pytest.mark.core
def test_what_cannot_stay_open_is_refused_with_the_line_that_fixes_it() -> None:
    x = torch.zeros(6, 5, 8)
    with pytest.raises(UnsupportedModelError, match=r"the batch is fixed to 6(?s:.*)y\.view\(self\.shape\)"):
        _at(_traced(Viewed(6, 5, -1), x), 6)
    with pytest.raises(UnsupportedModelError, match="graph breaks split the model into 2 regions"):
        _traced(Viewed(6, 5, -1, breaks=True), x)
    with pytest.raises(ConfigError, match="dimension 0 of the inputs, their batch, is 6 and 1"):
        _traced(Viewed(6, 5, -1), x, mask=torch.ones(1, 1, 8))
    halved = _traced(Viewed(2, -1, 8), x)
    assert _at(halved, 8).graphs
    with pytest.raises(ConfigError, match=r"batch=7 does not meet(?s:.*)y\.view\(self\.shape\)"):
        _at(halved, 7)
