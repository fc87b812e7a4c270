"""Every kind of model trains to the numbers of one process on the whole batch, operator by operator and by Inductor.

Also whole steps, batch norm with its running statistics, and parts by themselves. Beside Inductor one process computes
in float64: AdamW divides by the root of squared gradients, so where a gradient is near zero plain float32 training is
itself 2 % of the learning rate away from the exact update.
"""

from __future__ import annotations

import functools
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from tests import long
from tests.models import llama
from tests.models.kinds import KINDS, Slim
from tests.models.outlines import Small
from tests.numerics.one_process.measure import Differences, batches, train_pair
from tests.ranks import on_ranks
from tests.two_sides import (
    WithOneProcess,
    close,
    compare_parameters,
    compile_eagerly,
    loss_of,
    made,
    mean_over_ranks,
    share,
)

RATE = 1e-3


@pytest.mark.core
@long.parametrize("name", KINDS, always=["stack", "tied"])
@on_ranks()
def test_kind(name: str) -> None:
    train_pair(KINDS[name], clip=0.5)


@long.parametrize("name", ["odd-shapes", "stack", "tied"], always=["odd-shapes"])
@long.parametrize("world_size", [1, 4], always=[1])
@on_ranks(world_size=lambda world_size, **_: world_size)
def test_world_sizes(name: str, world_size: int) -> None:
    train_pair(KINDS[name], clip=0.5)


@long.parametrize("distance", [0, 2, 9], always=[2])
@on_ranks()
def test_prefetch_distance_changes_no_number(distance: int) -> None:
    train_pair(Slim, options={"prefetch": distance})


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("name", ["tied", "odd-shapes"])
@on_ranks(timeout_s=500)
def test_kind_through_inductor(name: str) -> None:
    train_pair(KINDS[name], lower="inductor", clip=0.5, within=Differences(1e-5, 1e-3, 0.02))


@pytest.mark.long
@pytest.mark.core
@pytest.mark.inductor
@pytest.mark.parametrize("optimizer_made", ["before", "after"])
@on_ranks(timeout_s=500)
def test_llama_trains_as_in_one_process(optimizer_made: Literal["before", "after"]) -> None:
    make = functools.partial(llama.model, vocab_size=97, hidden_size=64, intermediate_size=172)
    model, reference = made(make), made(make).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE) if optimizer_made == "before" else None
    compiled = torch.compile(model, backend="fsdp")
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=RATE)
    for step in range(3):
        ids = torch.randint(0, 97, (4 * dist.get_world_size(), 16), generator=torch.Generator().manual_seed(step))
        loss = compiled(input_ids=share(ids), labels=share(ids)).loss
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=RATE)
        loss.backward()
        expected = reference(input_ids=ids, labels=ids).loss
        expected.backward()
        assert abs(mean_over_ranks(loss).item() - expected.item()) < 1e-5
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert max((p.full_tensor() - q).abs().max().item() for p, q in pairs) / RATE < 0.02


def _step_of(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer, *, clip: bool) -> torch.Tensor:
    model.zero_grad()
    loss_of(model(batch)).backward()
    missing = torch.tensor(sum(p.grad is None for p in model.parameters()))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1) if clip else missing
    optimizer.step()
    return norm + missing


@long.parametrize("dynamic", [None, True], always=[True])
@on_ranks()
def test_it_trains_as_one_process(*, dynamic: bool | None) -> None:
    pair = WithOneProcess(Small, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    mine, theirs = pair.optimizers[0]
    # Torch's clipping of sharded parameters cannot be traced with `dynamic=True`.
    step = compile_eagerly(_step_of, dynamic=dynamic)
    for number in range(3):
        pair.rows = 2 + number
        rows, batch = pair.next_batch()
        norm = step(pair.model, rows, mine, clip=not dynamic)
        close(norm, _step_of(pair.reference, batch, theirs, clip=not dynamic), "norm")
        pair.compare()


class _Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(-1, 2, 4, 4)).flatten(1)


@pytest.mark.long
@on_ranks()
def test_batch_norm_keeps_each_ranks_own_statistics() -> None:
    """Beside data parallelism by hand: each rank its own statistics, gradients averaged."""
    model, reference = made(_Normalized), made(_Normalized)
    compiled = compile_eagerly(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    world = dist.get_world_size()
    for batch in batches(2, 4 * world):
        mine = share(batch)
        torch.testing.assert_close(compiled(mine), reference(mine))
        loss_of(compiled(mine)).backward()
        loss_of(reference(mine)).backward()
        for parameter in reference.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, buffer in model.named_buffers():
        assert not isinstance(buffer, DTensor)
        torch.testing.assert_close(buffer, reference.get_buffer(name))
    running = model.get_buffer("layers.1.running_mean")
    everywhere = [torch.empty_like(running) for _ in range(world)]
    dist.all_gather(everywhere, running)
    assert not torch.equal(everywhere[0], everywhere[1]), "statistics are each rank's own"
    compare_parameters(model, reference)


@on_ranks()
def test_a_part_runs_by_itself_and_loading_is_strict() -> None:
    model, reference = fully_shard(made(Slim)), made(Slim)
    x = torch.randn(2, 32)
    torch.testing.assert_close(model.blocks[1](x), reference.blocks[1](x))
    state = model.state_dict()
    moved = state.pop("head.bias")
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "head.bias": moved, "tail.bias": moved})
