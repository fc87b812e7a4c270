"""Experts on a mesh of their own, compiled: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_compile.backend import fsdp
from tests.models.experts import WIDTH, MixtureOfExperts
from tests.ranks import run_ranks

RANKS, TOKENS, STEPS = 4, 10, 3


def _shard(model: MixtureOfExperts) -> None:
    """Experts over (dp, ep), all else over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("every",))
    for layer in model.layers:
        experts: Any = layer.experts
        experts.split(mesh["ep"])
        fully_shard(experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
        experts.set_gradient_divide_factor(RANKS)  # they see the tokens of all ranks
        experts.set_force_sum_reduction_for_comms(True)  # gloo has no other
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)


def _trained(*, is_compiled: bool, one_expert: bool) -> list[torch.Tensor]:
    """Losses and whole parameters; of one process if not compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MixtureOfExperts()
    if one_expert:  # the others, and the ranks that have them, get no tokens
        with torch.no_grad():
            for layer in model.layers:
                layer.gate.weight.zero_()  # type: ignore[union-attr, operator]
    call: Any = model
    if is_compiled:
        _shard(model)
        call = torch.compile(model, backend=fsdp, options={"lower": "eager"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(RANKS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = call(batch[dist.get_rank()] if is_compiled else batch.flatten(0, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
        if is_compiled:
            dist.all_reduce(losses[-1], dist.ReduceOp.SUM)
            losses[-1] /= RANKS
    values = (p.detach() for p in model.parameters())
    return losses + [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def _compare(*, one_expert: bool) -> None:
    both = (_trained(is_compiled=is_compiled, one_expert=one_expert) for is_compiled in (True, False))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("one_expert", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled(*, one_expert: bool) -> None:
    run_ranks(_compare, one_expert=one_expert, world_size=RANKS)
