"""Without `torch.compile`: the bits of FSDP2, but for parameters that a forward reads twice and are not tied."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fully_shard
from tests import long
from tests.ranks import run_ranks


class _Blocks(nn.Module):
    def __init__(self, *, tied: bool, checkpointed: bool, again: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
        if tied:
            self.last.weight = self.first.weight
        self.checkpointed, self.again = checkpointed, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: Any = self._middle(x)
        if self.checkpointed:
            hidden = checkpoint(self._middle, x, use_reentrant=False)
        output: torch.Tensor = self.last(hidden)
        return self.first(output) if self.again else output

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))


def _model(*, tied: bool = False, checkpointed: bool = False, again: bool = False) -> _Blocks:
    torch.manual_seed(0)
    return _Blocks(tied=tied, checkpointed=checkpointed, again=again)


def _batch() -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(dist.get_rank()))


def _full_gradients(model: nn.Module) -> list[torch.Tensor]:
    gradients: list[Any] = [p.grad for p in model.parameters()]
    return [gradient.full_tensor() for gradient in gradients]


def _compare_with_fsdp2(tied: bool, checkpointed: bool) -> None:  # noqa: FBT001
    found = []
    for shard in (fully_shard, fsdp2):
        model: nn.Module = _model(tied=tied, checkpointed=checkpointed)
        shard(model)
        model(_batch()).square().sum().backward()
        found.append(_full_gradients(model))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@long.parametrize("checkpointed", [False, True], always=[True])
def test_activation_checkpointing_gives_the_gradients_of_fsdp2_bit_by_bit(checkpointed: bool) -> None:  # noqa: FBT001
    run_ranks(_compare_with_fsdp2, tied=False, checkpointed=checkpointed)


def test_a_tied_weight_gets_the_gradient_of_fsdp2_bit_by_bit() -> None:
    run_ranks(_compare_with_fsdp2, tied=True, checkpointed=False)


class _Apart(nn.Module):
    """The same with another layer for the second read, of the same values."""

    def __init__(self, model: _Blocks) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        self.model.again = False
        self.second = copy.deepcopy(model.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.model(x))
        return output


def _compare_with_averages_of_each_read() -> None:
    model = _model(again=True)
    apart = _Apart(model)
    fully_shard(model)
    for each in (model, apart):
        each(_batch()).square().sum().backward()
    averages = []
    for parameter in (apart.second.weight, apart.model.first.weight):
        assert parameter.grad is not None
        average = parameter.grad.clone()
        dist.all_reduce(average)
        averages.append(average / dist.get_world_size())
    assert torch.equal(_full_gradients(model)[0], averages[0] + averages[1])


def test_a_weight_that_is_read_twice_gets_the_sum_of_the_averages_of_its_reads() -> None:
    run_ranks(_compare_with_averages_of_each_read)
