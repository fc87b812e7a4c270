"""Activation checkpointing that saves more than activations."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp_compile
from fsdp_compile import fully_shard
from tests.fake_world import fake_world
from tests.two_sides import compare_gradients, compile_eagerly


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
