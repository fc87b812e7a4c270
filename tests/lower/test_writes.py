"""What the operators of a graph write, nothing reads that stands before them: also in Inductor's code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from fsdp_compile import fully_shard, step_in_backward
from tests.ranks import run_ranks

WIDTH = 32


class _ReadTwice(nn.Module):
    """Backward has the gradient of `scale` before it comes to where its value is read, without one, a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.first(x) * self.scale.detach()).tanh()
        return self.last(x).tanh() * self.scale


def _trained(lower: str, *, in_backward: bool, **options: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _ReadTwice()
    for module in (model.first, model.last, model):
        fully_shard(module, sharding_strategy=ShardingStrategy.NO_SHARD)  # graphs read the shards themselves
    optimizer = torch.optim.SGD(model.parameters(), lr=100)  # whoever reads an updated value is far off
    if in_backward:
        optimizer = step_in_backward(optimizer)
    # A graph in Inductor's cache would tell of the code as it was.
    settings: dict[str, Any] = {"inductor": {"fx_graph_cache": False}} if lower == "inductor" else {}
    compiled = torch.compile(model, backend="fsdp", options={"lower": lower, **settings, **options})
    compiled(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def _both() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return _trained("inductor", in_backward=True), _trained("eager", in_backward=False)


@pytest.mark.inductor
def test_a_parameter_that_is_read_again_is_updated_after_that() -> None:
    ((in_backward, after),) = run_ranks(_both, world_size=1)
    torch.testing.assert_close(in_backward, after)
