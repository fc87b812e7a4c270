"""Context parallelism: sharded over the flattened (data, context) mesh, with torch's ring attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from tests.ranks import on_ranks, run_ranks

STEPS = 2


@dataclasses.dataclass(frozen=True)
class _Case:
    """How many ranks have batches of their own, how many share each, and which way of torch's splits attention."""

    mesh: tuple[int, int]
    layers: int = 2
    by_modules: bool = False


CASES = {
    "cp 2": _Case((1, 2), layers=1),
    "dp 2 x cp 2": _Case((2, 2)),
    "cp 4": _Case((1, 4)),
    "cp 2, by modules": _Case((1, 2), by_modules=True),
}


@dataclasses.dataclass(frozen=True)
class _Trained:
    """What training left behind.

    Attributes:
        losses: Of this rank's tokens, per step.
        parameters: This rank's shards, and gradients of the last step.
        whole: The full parameters.
    """

    losses: list[torch.Tensor]
    parameters: list[torch.Tensor]
    whole: list[torch.Tensor]


def _trained(case: _Case, fully_shard: Any, lower: str | None) -> _Trained:
    torch._dynamo.reset()
    world = init_device_mesh("cpu", case.mesh, mesh_dim_names=("dp", "cp"))
    everyone, context = world["dp", "cp"]._flatten("dp_cp"), world["cp"]
    torch.manual_seed(0)
    model = PositionedLlama(case.layers)
    if case.by_modules:
        split_attention(model, context)
    for module in (*model.layers, model):
        fully_shard(module, mesh=everyone)
    call = model if lower is None else torch.compile(model, backend="fsdp", options={"lower": lower})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    split = split_by_modules if case.by_modules else split_by_context
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with split(context, sequences(10 * step + world["dp"].get_local_rank())) as batch:
            loss = call(*batch)
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters: list[Any] = list(model.parameters())
    shards = [part.to_local() for p in parameters for part in (p.detach(), p.grad)]
    return _Trained(losses, shards, [p.detach().full_tensor() for p in parameters])


def _in_one_process(case: _Case) -> _Trained:
    torch.manual_seed(0)
    model = PositionedLlama(case.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [sequences(10 * step + place) for place in range(case.mesh[0])]
        loss = model(*(torch.cat(each) for each in zip(*parts, strict=True)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return _Trained(losses, [], [p.detach() for p in model.parameters()])


def _check_one_process(case: _Case, trained: _Trained) -> None:
    whole = _in_one_process(case)
    for loss, expected in zip(trained.losses, whole.losses, strict=True):
        total = loss.clone()
        dist.all_reduce(total)  # all ranks have equally many tokens
        torch.testing.assert_close(total / dist.get_world_size(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trained.whole, whole.whole, rtol=1e-4, atol=1e-5)


def _differences(name: str, lower: str | None) -> list[int]:
    """The places of what is not FSDP2's, bit for bit; one process must be near."""
    with cpu_kernels():
        ours = _trained(CASES[name], fsdp_compile.fully_shard, lower)
        theirs = _trained(CASES[name], torch.distributed.fsdp.fully_shard, None)
    _check_one_process(CASES[name], ours)
    pairs = zip([*ours.losses, *ours.parameters], [*theirs.losses, *theirs.parameters], strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


@pytest.mark.long
@pytest.mark.inductor
@on_ranks()
def test_inductor() -> None:
    with cpu_kernels():
        _check_one_process(CASES["cp 2"], _trained(CASES["cp 2"], fsdp_compile.fully_shard, "inductor"))


def _ranks(name: str) -> int:
    return CASES[name].mesh[0] * CASES[name].mesh[1]


@pytest.mark.core
@long.parametrize("name", CASES, always=["cp 2"])
def test_compiled(name: str) -> None:
    assert run_ranks(_differences, name, "eager", world_size=_ranks(name)) == [[]] * _ranks(name)


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
