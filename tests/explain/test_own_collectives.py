"""Collectives of the program's own, as tensor parallelism has them: they take time, and reports say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import explain, fully_shard
from fsdp_compile.cost.communicate import Kind, is_own, own_communication
from fsdp_compile.cost.fusion import Fusion, plan_kernels
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.cost.timeline import times_us
from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.explain.plan import Plan
from fsdp_compile.layout.hosts import GroupRanks
from fsdp_compile.passes.follow_order import NewOrder
from fsdp_compile.passes.hide_own_collectives import HideOwnCollectives
from tests.fake_world import fake_world
from tests.models.tensor_parallel import VOCABULARY, Llama, split

collectives = torch.ops._c10d_functional
MB = 2**20


def _graph(operator: torch._ops.OpOverload, *arguments: object) -> tuple[fx.Graph, list[fx.Node]]:
    """Such a collective over 4 ranks, computing that does not need it, and the wait."""
    with FakeTensorMode():
        group = torch.distributed.group.WORLD
        assert group is not None
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(MB // 4)
        own = graph.call_function(operator, (x, *arguments, group.group_name))  # type: ignore[arg-type]
        own.meta["val"] = operator(x.meta["val"], *arguments, group.group_name)
        computed = graph.call_function(torch.ops.aten.relu.default, (x,))
        wait = graph.call_function(collectives.wait_tensor.default, (own,))
        computed.meta["val"], wait.meta["val"] = x.meta["val"], own.meta["val"]
    return graph, [own, computed, wait]


@pytest.mark.parametrize(
    ("operator", "arguments", "sent_bytes"),
    [
        pytest.param(collectives.all_reduce.default, ("sum",), 2 * MB * 3 / 4, id="all-reduce"),
        pytest.param(collectives.all_gather_into_tensor.default, (4,), 4 * MB * 3 / 4, id="all-gather"),
        pytest.param(collectives.reduce_scatter_tensor.default, ("sum", 4), MB * 3 / 4, id="reduce-scatter"),
    ],
)
@pytest.mark.parametrize(("per_host", "rate"), [(4, 0.9 * 450e9), (2, 2 * 50e9 * 323 / 400)])
def test_time_of_a_collective(
    operator: torch._ops.OpOverload, arguments: tuple[object, ...], sent_bytes: float, per_host: int, rate: float
) -> None:
    there = hardware("h100-sxm", ranks_per_host=per_host)
    with fake_world(4):
        _, (node, *_) = _graph(operator, *arguments)
        assert is_own(node)
        sent = own_communication(node, there)
        assert sent.sent_bytes == sent_bytes
        assert sent.alone_us == pytest.approx(there.link_of(GroupRanks(4)).formula_us(sent_bytes, 4, rate))


@pytest.mark.parametrize(("per_host", "links"), [(2, ("ib-400", "nvlink4")), (4, ("nvlink4", "nvlink4"))])
def test_a_report_has_a_lane_for_each_group_on_its_link(per_host: int, links: tuple[str, str]) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        there = hardware("h100-sxm", ranks_per_host=per_host)
        options: dict[str, Any] = {"lower": "eager", "hardware": there}
        compiled = torch.compile(model, backend="fsdp", options=options)
        compiled(torch.randn(4, 8, requires_grad=True)).sum().backward()
        plan = explain(compiled, hardware=there)
    assert plan.lanes == (f"{links[0]}: fsdp.shard.0", f"{links[1]}: tp")
    assert [len(graph.own) for graph in plan.graphs] == [1, 1]  # of the output, and of the input's gradient
    for graph in plan.graphs:
        (own,) = graph.own
        assert (own.kind, own.link, own.ranks) == (Kind.REPLICATE, links[1], 2)
        assert 0 < own.exposed_us <= graph.exposed_us
        # Compute and what it waits for make up the graph: nothing is counted twice.
        assert graph.compute_us + graph.exposed_us == pytest.approx(graph.end_us)
    assert "2 collectives" in str(plan)
    assert str(plan).split("lanes")[1].count("tp") >= 1


@pytest.mark.parametrize("held_as", ["parameter", "buffer", "argument"])
def test_a_split_model_that_has_not_run_is_refused(held_as: str) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        split_tensor = DTensor.from_local(torch.zeros(4, 8), mesh["tp"], [Shard(0)], run_check=False)
        model, x = nn.Linear(8, 8), torch.zeros(4, 8)
        if held_as == "parameter":
            model.weight = nn.Parameter(split_tensor)
        if held_as == "buffer":
            model.register_buffer("table", split_tensor)
        given = split_tensor if held_as == "argument" else x
        with pytest.raises(UnsupportedModelError, match="split over mesh"):
            explain(model, given, options={"lower": "eager", "mesh": mesh["dp"]})


def test_the_planner_counts_what_nothing_hides_of_them() -> None:
    there = hardware("h100-sxm", ranks_per_host=4)
    with fake_world(4):
        graph, nodes = _graph(collectives.all_reduce.default, "sum")
        sent = own_communication(nodes[0], there)
        took = times_us(graph, there, plan_kernels(graph, Fusion.NONE))
    start, computed, wait = (took[node] for node in nodes)
    assert start == 0.0
    assert 0.0 < computed < sent.alone_us
    assert wait == pytest.approx(sent.alone_us - computed)


def _backward_of_a_split_llama() -> tuple[Plan, float]:
    """Its report, and for how long compute stands still in backward for its own collectives."""
    torch.compiler.reset()
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = split(Llama(), mesh["tp"])
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["dp"])
        there = hardware("cpu", ranks_per_host=2)
        options: dict[str, Any] = {"lower": "eager", "hardware": there}
        compiled = torch.compile(model, backend="fsdp", options=options)
        compiled(torch.full((16, 64), VOCABULARY - 1)).backward()
        plan = explain(compiled, hardware=there)
    return plan, sum(own.exposed_us for own in plan.graphs[1].own)


@pytest.mark.long
def test_weight_gradients_are_computed_behind_the_programs_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, exposed_us = _backward_of_a_split_llama()
    monkeypatch.setattr(HideOwnCollectives, "plan", lambda *_: NewOrder(()))
    before, exposed_before_us = _backward_of_a_split_llama()
    assert [own.sent_bytes for own in plan.graphs[1].own] == [own.sent_bytes for own in before.graphs[1].own]
    assert 0.0 < exposed_us < 0.8 * exposed_before_us
