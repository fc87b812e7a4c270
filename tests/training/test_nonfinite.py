"""The first unit of backward whose gradient is not finite, by name, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from fsdp_compile.comm.world import World
from fsdp_compile.training.trainer import describe_nonfinite
from tests.ranks import run_ranks

INF = float("inf")
FIRST = "the first gradient that is not finite is that of"


def _describe(broken: dict[str, list[int]], losses: list[float]) -> str:
    """Describe gradients that are infinite in the rows of some ranks, and losses of ranks."""
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    for unit in (*model, model):
        fully_shard(unit)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        assert isinstance(parameter.grad, DTensor)
        if world.rank in broken.get(name, []):
            parameter.grad.to_local()[0] = INF
    return describe_nonfinite(model, torch.tensor(losses[world.rank]), world)


@pytest.mark.parametrize(
    ("broken", "losses", "said"),
    [
        ({}, [1.0, INF], "the loss of rank 1 is inf; all gradients are finite"),
        ({}, [1.0, 1.0], "all gradients are finite, but not their norm"),
        (
            {"0.weight": [0, 1], "1.0.bias": [1], "1.0.weight": [0]},
            [1.0, 1.0],
            f"{FIRST} unit 1, 1.0.bias, in rows of rank 1",
        ),
        (
            {"0.bias": [0, 1], "2.weight": [0, 1]},
            [-INF, 1.0],
            f"the loss of rank 0 is -inf; {FIRST} unit 2, 2.weight, in rows of rank 0, 1",
        ),
    ],
)
def test_what_is_not_finite_is_named(broken: dict[str, list[int]], losses: list[float], said: str) -> None:
    assert run_ranks(_describe, broken, losses) == [said] * 2
