"""Collectives of the program's own, as tensor parallelism has them: they take time, and reports say so."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import explain, fully_shard
from fsdp_compile.cost.hardware import hardware
from fsdp_compile.cost.own_collectives import is_own, own_us
from fsdp_compile.layout.hosts import GroupRanks
from tests.fake_world import fake_world

collectives = torch.ops._c10d_functional
MB = 2**20


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
    with fake_world(4), FakeTensorMode():
        group = torch.distributed.group.WORLD
        assert group is not None
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(MB // 4)
        node = graph.call_function(operator, (x, *arguments, group.group_name))  # type: ignore[arg-type]
        node.meta["val"] = operator(x.meta["val"], *arguments, group.group_name)
        assert is_own(node)
        assert own_us(node, there) == pytest.approx(there.link_of(GroupRanks(4)).formula_us(sent_bytes, 4, rate))


def test_a_report_counts_them_as_compute() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        compiled(torch.randn(4, 8, requires_grad=True)).sum().backward()
        plan = explain(compiled)
    assert [graph.own_collectives for graph in plan.graphs] == [1, 1]  # of the output, and of the input's gradient
    for graph in plan.graphs:
        assert 0 < graph.own_us < graph.compute_us
    assert "2 collectives" in str(plan)
