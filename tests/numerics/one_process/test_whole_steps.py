"""Whole training steps compiled, batch norm with its running statistics, and parts by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from tests import long
from tests.models.kinds import Slim
from tests.models.outlines import Small
from tests.numerics.one_process.measure import batches
from tests.ranks import on_ranks
from tests.two_sides import WithOneProcess, close, compile_eagerly, loss_of


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
        share, batch = pair.next_batch()
        norm = step(pair.model, share, mine, clip=not dynamic)
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
    torch.manual_seed(0)
    model = _Normalized()
    reference = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    world, rank = dist.get_world_size(), dist.get_rank()
    for batch in batches(2, 4 * world):
        mine = batch.chunk(world)[rank]
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
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), reference.get_parameter(name).detach())  # type: ignore[attr-defined]


@on_ranks()
def test_a_part_runs_by_itself_and_loading_is_strict() -> None:
    """A block of a sharded model is called without the model, and names that do not fit are refused on loading."""
    torch.manual_seed(0)
    model = Slim()
    reference = copy.deepcopy(model)
    fully_shard(model)
    x = torch.randn(2, 32)
    torch.testing.assert_close(model.blocks[1](x), reference.blocks[1](x))
    state = model.state_dict()
    moved = state.pop("head.bias")
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**state, "head.bias": moved, "tail.bias": moved})
