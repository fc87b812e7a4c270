"""Context parallelism: sharded over the flattened (data, context) mesh, with torch's ring attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from tests import long
from tests.models.context_parallel import (
    LENGTH,
    PositionedLlama,
    cpu_kernels,
    sequences,
    split_attention,
    split_by_context,
    split_by_modules,
)
from tests.numerics.one_process.measure import adamw_with_eps
from tests.ranks import on_ranks
from tests.two_sides import close, compile_eagerly, made, mean_over_ranks

STEPS = 2


class _Case(NamedTuple):
    """How many ranks have batches of their own, how many share each, and which way of torch's splits attention."""

    mesh: tuple[int, int]
    layers: int = 2
    by_modules: bool = False


Trained = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
"""Losses of this rank's tokens, its shards and gradients of the last step, and the full parameters."""


CASES = {
    "cp 2": _Case((1, 2), layers=1),
    "dp 2 x cp 2": _Case((2, 2)),
    "cp 4": _Case((1, 4)),
    "cp 2, by modules": _Case((1, 2), by_modules=True),
}


def _trained(case: _Case, fully_shard: Any, lower: str | None) -> Trained:
    torch._dynamo.reset()
    world = init_device_mesh("cpu", case.mesh, mesh_dim_names=("dp", "cp"))
    everyone, context = world["dp", "cp"]._flatten("dp_cp"), world["cp"]
    model: Any = made(lambda: PositionedLlama(case.layers))
    if case.by_modules:
        split_attention(model, context)
    for module in (*model.layers, model):
        fully_shard(module, mesh=everyone)
    call = model if lower is None else compile_eagerly(model, lower=lower)
    optimizer = adamw_with_eps(model.parameters())
    split = split_by_modules if case.by_modules else split_by_context
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with split(context, sequences(10 * step + world["dp"].get_local_rank())) as batch:
            loss = call(*batch)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    shards = [part.to_local() for p in model.parameters() for part in (p.detach(), p.grad)]
    return losses, shards, [p.detach().full_tensor() for p in model.parameters()]


def _check_one_process(case: _Case, trained: Trained) -> None:
    losses, _, whole = trained
    model = made(lambda: PositionedLlama(case.layers))
    optimizer = adamw_with_eps(model.parameters())
    for step, mine in enumerate(losses):
        optimizer.zero_grad()
        parts = [sequences(10 * step + place) for place in range(case.mesh[0])]
        loss = model(*(torch.cat(each) for each in zip(*parts, strict=True)))
        loss.backward()
        optimizer.step()
        close(mean_over_ranks(mine), loss, "loss", (1e-5, 1e-6))  # all ranks have equally many tokens
    for found, expected in zip(whole, model.parameters(), strict=True):
        close(found, expected, "parameter", (1e-4, 1e-5))


@pytest.mark.long
@pytest.mark.inductor
@on_ranks()
def test_inductor() -> None:
    with cpu_kernels():
        _check_one_process(CASES["cp 2"], _trained(CASES["cp 2"], fsdp_compile.fully_shard, "inductor"))


@pytest.mark.core
@long.parametrize("name", CASES, always=["cp 2"])
@on_ranks(world_size=lambda name: torch.Size(CASES[name].mesh).numel())
def test_compiled(name: str) -> None:
    """Bit for bit FSDP2's, and near one process."""
    case = CASES[name]
    with cpu_kernels():
        ours = _trained(case, fsdp_compile.fully_shard, "eager")
        theirs = _trained(case, torch.distributed.fsdp.fully_shard, None)
    _check_one_process(case, ours)
    for mine, expected in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, expected))


@on_ranks()
def test_graphs_of_whole_and_of_split_sequences_are_not_mixed_up() -> None:
    """Losses of the same tokens: before, in and after the block in which torch replaces attention."""
    torch.manual_seed(0)
    world = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    model = PositionedLlama(layers=1)
    call = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    whole = [each[:, : LENGTH // 2].contiguous() for each in sequences(5)]  # as long as a rank's part
    with cpu_kernels(), torch.no_grad():
        losses = [call(*whole).item()]
        with split_by_context(world["cp"], sequences(5)) as batch:
            losses.append(call(*batch).item())
            losses.append(model(*batch).item())
        losses.append(call(*whole).item())
    before, split, expected, after = losses
    assert before == after
    assert split == expected != before
