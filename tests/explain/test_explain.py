"""What `explain` may be given, what it leaves alone, and what it says that it skipped."""

from __future__ import annotations

import random
import resource
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_compile.cost.communicate import Kind
from fsdp_compile.errors import ConfigError, UnsupportedModelError
from fsdp_compile.explain.api import explain
from fsdp_compile.explain.plan import Plan
from fsdp_compile.ir.graph import Phase
from fsdp_compile.sharding.fully_shard import fully_shard
from tests.fake_world import fake_world
from tests.models.round_sizes import WIDTH, Broken, Partial, Stack, explained, on_meta

EAGER: dict[str, Any] = {"lower": "eager"}


def _skipped(plan: Plan) -> dict[str, str]:
    return {item.what: item.why for item in plan.skipped}


def test_the_model_is_left_as_it_was() -> None:
    model = Stack(2)
    model.register_buffer("scale", torch.ones(3))
    held = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in held.items()}
    explain(model, torch.randn(8, WIDTH), world_size=4, options=EAGER)
    assert not dist.is_initialized()
    assert type(model) is Stack
    for name, parameter in model.named_parameters():
        assert parameter is held[name]
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, values[name])
        assert parameter.grad is None
    model(torch.randn(8, WIDTH)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Drawing(nn.Module):
    """Its forward draws random numbers in Python: in what Dynamo traces, and in what it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * random.random() * _factor()


@torch.compiler.disable
def _factor() -> float:
    return float(torch.rand(())) + float(np.random.random())  # noqa: NPY002


def test_random_numbers_are_drawn_for_no_one() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(torch.rand(())), float(np.random.random())  # noqa: NPY002

    def seed() -> None:
        random.seed(0)
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002

    model = Drawing()
    seed()
    expected = drawn()
    seed()
    explain(model, torch.zeros(4, 16), world_size=4, options=EAGER)
    assert drawn() == expected


def test_a_model_larger_than_this_machine_is_explained() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1 << 17, 1 << 17, bias=False) for _ in range(2)))
        x = torch.zeros(16, 1 << 17)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = explain(model, x, world_size=64, options=EAGER)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(unit.full_bytes for unit in plan.units) == 2 * 4 << 34  # 137 GB
    assert grown_kb < 500_000
    assert all(p.device.type == "meta" for p in model.parameters())


@pytest.mark.long
def test_meta_and_real_models_have_the_same_plan() -> None:
    real = explain(Stack(), torch.zeros(64, WIDTH), world_size=4, options=EAGER).to_dict()
    assert explained().to_dict() == explained().to_dict() == real


def test_inductor_graphs_have_the_same_forward_collectives_and_fewer_live_values() -> None:
    eager, inductor = (explained(lower=lower) for lower in ("eager", "inductor"))

    def sent(plan: Plan) -> list[tuple[str, str, int]]:
        return [(c.unit, c.kind.value, c.size_bytes) for graph in plan.forward for c in graph.collectives]

    assert sent(inductor) == sent(eager)
    assert inductor.volume.sent_bytes[Kind.REDUCE] == eager.volume.sent_bytes[Kind.REDUCE]
    assert sum(g.compute_us for g in inductor.graphs) < sum(g.compute_us for g in eager.graphs)


def test_rows_that_do_not_divide_are_counted_as_padding_and_named() -> None:
    plan = explained(lambda: nn.Linear(1000, 5, bias=False), x=torch.zeros(8, 1000))
    # Each rank holds ceil(5 / 4) = 2 rows of 1000 float32, rounded up to 256 bytes, which are 128 in 16 bits; 5/4 of a
    # row would do.
    (unit,) = plan.units
    assert (unit.shard_bytes, unit.padding_bytes) == (32 * 256, 32 * 256 - 5000)
    assert _skipped(plan)["weight: even split"] == "its 5 rows over 4 ranks are padded by 60 %"


def test_a_group_of_the_same_size_is_used_and_kept() -> None:
    with fake_world(4):
        assert explained(world_size=None).world_size == 4
        assert dist.get_world_size() == 4
        with pytest.raises(ConfigError, match="process group of 4 ranks"):
            explained(world_size=8)


def test_what_cannot_be_planned_is_refused() -> None:
    model, x = on_meta(Stack)
    model.attached = (n for n in range(3))  # type: ignore[assignment]
    for call, what in (
        (lambda: explained(world_size=None), "world_size"),
        (lambda: explained(world_size=0), "cannot plan for 0 ranks"),
        (lambda: explain(lambda: None, world_size=4), r"not a torch\.nn\.Module"),
        (lambda: explained(lowr="eager"), "lower"),
        (lambda: explained(x=torch.zeros(64, WIDTH + 1, device="meta")), "cannot be traced"),
        (lambda: explain(model, x, world_size=4), "cannot be copied"),
    ):
        with pytest.raises((ConfigError, UnsupportedModelError), match=what):
            call()
    assert not dist.is_initialized()


def test_graph_breaks_make_regions_whose_backwards_run_in_reverse() -> None:
    plan = explained(Broken)
    order = [(graph.phase, graph.region) for graph in plan.graphs]
    assert order == [(Phase.FORWARD, 0), (Phase.FORWARD, 1), (Phase.BACKWARD, 1), (Phase.BACKWARD, 0)]
    assert "graph breaks" in _skipped(plan)["overlap across compiled regions"]


def test_frozen_and_unread_parameters_are_named() -> None:
    said = _skipped(explained(Partial))
    assert said["frozen.weight: not reduced"] == "frozen"
    assert said["unused: not gathered in forward"] == "the graph does not read it"
    assert said["unused: not reduced"] == "no output depends on it"


def test_kept_units_a_single_rank_and_missing_gradients_are_named() -> None:
    kept = _skipped(explained(reshard_after_forward=False))
    assert kept["blocks.0, blocks.1, blocks.2: not resharded after forward"] == "reshard_after_forward=False"
    alone = explained(world_size=1)
    assert _skipped(alone) == {"all collectives": "there is one rank"}
    assert alone.volume.total_bytes == 0
    with torch.no_grad():
        inference = explained()
    assert "gradients are off" in _skipped(inference)["backward"]
    assert inference.backward == ()
    assert inference.volume.sent_bytes.keys() == {Kind.GATHER}


def test_a_compiled_model_is_explained_as_it_ran() -> None:
    options = {**EAGER, "bucket_mb": 0}  # how many units share a collective depends on the link
    model = Stack()
    planned = explain(model, torch.zeros(64, WIDTH), world_size=4, options=options)
    with fake_world(4):
        compiled = torch.compile(fully_shard(model), backend="fsdp", options=options)
        compiled(torch.randn(64, WIDTH)).sum().backward()
        ran = explain(compiled)
        with torch.no_grad():
            compiled(torch.randn(64, WIDTH))
        assert [graph.phase for graph in explain(model).graphs] == [Phase.FORWARD, Phase.BACKWARD]
        with pytest.raises(ConfigError, match="as it ran"):
            explain(compiled, torch.randn(64, WIDTH))
        with pytest.raises(ConfigError, match="sharded over 4 ranks"):
            explain(compiled, world_size=8)
    assert ran.world_size == 4
    assert [c.parameters for g in ran.graphs for c in g.collectives] == [
        c.parameters for g in planned.graphs for c in g.collectives
    ]
    assert ran.volume == planned.volume


def test_a_compiled_model_that_has_not_run_is_planned_if_plain_and_refused_if_sharded() -> None:
    model, x = on_meta(Stack)
    assert explain(torch.compile(model), x, world_size=4, options=EAGER).world_size == 4
    with fake_world(4):
        sharded = fully_shard(Stack())
        with pytest.raises(ConfigError, match="has not run yet"):
            explain(sharded)


class Untraced(nn.Module):
    """Reads a parameter where Dynamo does not look."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._read(x) + 1

    @torch.compiler.disable
    def _read(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_parameters_that_are_read_outside_of_graphs_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"(?s)in code that torch does not trace.*\(root\), Untraced"):
        explained(Untraced, x=torch.zeros(4, 16))
