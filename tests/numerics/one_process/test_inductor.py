"""The one line, through Inductor: transformers' Llama on two ranks against one process on the whole batch.

The one process computes in float64: AdamW divides by the root of squared gradients, so where a gradient is near zero
plain float32 training is itself 2 % of the learning rate away from the exact update.
"""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models.kinds import KINDS
from tests.numerics.one_process.measure import train_pair
from tests.ranks import on_ranks

pytestmark = pytest.mark.inductor
RATE = 1e-3


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=172,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


@pytest.mark.long
@pytest.mark.core
@pytest.mark.parametrize("optimizer_made", ["before", "after"])
@on_ranks(timeout_s=500)
def test_llama_trains_as_in_one_process(optimizer_made: Literal["before", "after"]) -> None:
    """Differences of the losses, and of the parameters after three AdamW steps in units of the learning rate."""
    torch.manual_seed(0)
    model = _llama()
    reference = copy.deepcopy(model).double()
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE) if optimizer_made == "before" else None
    compiled = torch.compile(model, backend="fsdp")
    losses = []
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=RATE)
    for step in range(3):
        ids = torch.randint(0, 97, (4 * world, 16), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(world)[rank]
        loss = compiled(input_ids=mine, labels=mine).loss
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=RATE)
        loss.backward()
        reference_loss = reference(input_ids=ids, labels=ids).loss
        reference_loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(abs(mean.item() - reference_loss.item()))
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    update = max((p.full_tensor() - q).abs().max().item() for p, q in pairs) / RATE  # type: ignore[attr-defined]
    assert max(losses) < 1e-5
    assert update < 0.02


@pytest.mark.long
@pytest.mark.parametrize("name", ["tied", "odd-shapes"])
@on_ranks(timeout_s=500)
def test_kind(name: str) -> None:
    found = train_pair(KINDS[name], lower="inductor", clip=0.5)
    assert found.loss < 1e-5
    assert found.gradient < 1e-3
    assert found.parameter < 0.02
