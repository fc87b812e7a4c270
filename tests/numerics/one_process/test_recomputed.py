"""What activation checkpointing means where `torch.compile` differs from eager code: as in each of the two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import fully_shard
from tests.fake_world import fake_world
from tests.ranks import on_ranks
from tests.two_sides import close, compare_gradients, compile_eagerly, loss_of, share


class _Reentrant(nn.Module):
    """Nothing that is checkpointed has an input that needs gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recomputed: torch.Tensor = checkpoint(self.inner, x, use_reentrant=True)
        out: torch.Tensor = self.head(x + recomputed)
        return out


class _Normed(nn.Module):
    """A batch norm that is checkpointed, and so computed twice in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(checkpoint(self.inner, x, use_reentrant=False))
        return out


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    return batch, share(batch)


@pytest.mark.long
@on_ranks()
def test_reentrant_checkpointing_without_gradients_of_inputs_is_that_of_torch_compile_or_of_eager_code() -> None:
    torch.manual_seed(0)
    eager = _Reentrant()
    plain, mine, fsdp2 = (copy.deepcopy(eager) for _ in range(3))
    torchs_fully_shard(fsdp2)
    batch, share = _batch()
    called: list[tuple[Any, torch.Tensor]] = [
        (eager, batch),
        (torch.compile(plain, backend="aot_eager"), batch),
        (compile_eagerly(mine), share),
        (fsdp2, share),
    ]
    for model, x in called:
        loss_of(model(x)).backward()
    assert eager.inner.weight.grad is None
    assert plain.inner.weight.grad is not None
    compare_gradients(mine, plain)
    compare_gradients(fsdp2, eager)


@on_ranks()
def test_a_checkpointed_batch_norm_updates_its_statistics_as_often_as_torch_compile_or_eager_code() -> None:
    torch.manual_seed(0)
    eager = _Normed()
    plain, mine, fsdp2 = (copy.deepcopy(eager) for _ in range(3))
    torchs_fully_shard(fsdp2)
    _, share = _batch()
    called: list[Any] = [eager, torch.compile(plain, backend="aot_eager"), compile_eagerly(mine), fsdp2]
    for model in called:
        loss_of(model(share)).backward()
    once, twice = (dict(model.named_buffers()) for model in (plain, eager))
    assert not torch.allclose(once["inner.0.running_mean"], twice["inner.0.running_mean"])
    for model, expected in ((mine, once), (fsdp2, twice)):
        for name, buffer in model.named_buffers():
            close(buffer.float(), expected[name].float(), name)


class _Attends(nn.Module):
    """An attention that is checkpointed: torch saves the state of its random numbers for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = checkpoint(self._attend, x, use_reentrant=False)
        out: torch.Tensor = self.head(attended)
        return out

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


def test_gradients_accumulate_where_a_state_of_random_numbers_is_saved() -> None:
    torch.manual_seed(0)
    with fake_world(1):
        model = _Attends()
        reference = copy.deepcopy(model)
        compiled = compile_eagerly(fully_shard(model))
        for batch in torch.randn(2, 3, 4, 6):
            with fsdp_compile.no_sync(model):
                compiled(batch).square().mean().backward()
            reference(batch).square().mean().backward()
        batch = torch.randn(3, 4, 6)
        compiled(batch).square().mean().backward()
        reference(batch).square().mean().backward()
        compare_gradients(model, reference, (1.3e-6, 1e-5))
