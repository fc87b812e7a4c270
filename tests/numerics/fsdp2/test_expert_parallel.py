"""Experts on a mesh of their own: equal to one process, and uncompiled bit for bit what FSDP2 makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp_compile
from tests.models.experts import WIDTH, MixtureOfExperts
from tests.ranks import run_ranks

RANKS, TOKENS, STEPS = 4, 10, 3


def _shard(model: MixtureOfExperts, fully_shard: Any) -> None:
    """Experts over (dp, ep), all else over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("every",))
    for layer in model.layers:
        experts: Any = layer.experts
        experts.split(mesh["ep"])
        fully_shard(experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
        experts.set_gradient_divide_factor(RANKS)  # they see the tokens of all ranks
        if fully_shard is torch.distributed.fsdp.fully_shard:
            experts.set_force_sum_reduction_for_comms(True)  # gloo has no other
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)


def _trained(fully_shard: Any = None, lower: str | None = None, *, one_expert: bool = False) -> list[torch.Tensor]:
    """Losses and whole parameters; of one process without `fully_shard`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MixtureOfExperts()
    if one_expert:  # the others, and the ranks that have them, get no tokens
        with torch.no_grad():
            for layer in model.layers:
                layer.gate.weight.zero_()  # type: ignore[union-attr, operator]
    if fully_shard is not None:
        _shard(model, fully_shard)
    call = model if lower is None else torch.compile(model, backend="fsdp", options={"lower": lower})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(RANKS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = call(batch.flatten(0, 1) if fully_shard is None else batch[dist.get_rank()]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
        if fully_shard is not None:
            dist.all_reduce(losses[-1], dist.ReduceOp.SUM)
            losses[-1] /= RANKS
    values = (p.detach() for p in model.parameters())
    return losses + [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def _compare(lower: str | None, *, one_expert: bool) -> None:
    ours = _trained(fsdp_compile.fully_shard, lower, one_expert=one_expert)
    theirs = _trained(torch.distributed.fsdp.fully_shard, one_expert=one_expert)
    if lower is None:  # AOTAutograd adds the gradients of several experts in another order
        assert [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)] == []
    for a, b in zip(ours, _trained(one_expert=one_expert), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("one_expert", [False, pytest.param(True, marks=pytest.mark.long)])
def test_uncompiled(*, one_expert: bool) -> None:
    run_ranks(_compare, None, one_expert=one_expert, world_size=RANKS)


@pytest.mark.long
@pytest.mark.parametrize("one_expert", [False, True])
def test_compiled(*, one_expert: bool) -> None:
    run_ranks(_compare, "eager", one_expert=one_expert, world_size=RANKS)
