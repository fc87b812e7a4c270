"""Every kind of model trains to the numbers of one process on the whole batch, operator by operator and by Inductor.

Beside Inductor one process computes in float64: AdamW divides by the root of squared gradients, so where a gradient is
near zero plain float32 training is itself 2 % of the learning rate away from the exact update.
"""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import long
from tests.models.kinds import KINDS, Slim
from tests.numerics.one_process.measure import Differences, train_pair
from tests.ranks import on_ranks
from tests.two_sides import mean_over_ranks, share

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
@pytest.mark.inductor
@pytest.mark.parametrize("optimizer_made", ["before", "after"])
@on_ranks(timeout_s=500)
def test_llama_trains_as_in_one_process(optimizer_made: Literal["before", "after"]) -> None:
    """Differences of the losses, and of the parameters after three AdamW steps in units of the learning rate."""
    torch.manual_seed(0)
    model = _llama()
    reference = copy.deepcopy(model).double()
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
    assert max((p.full_tensor() - q).abs().max().item() for p, q in pairs) / RATE < 0.02  # type: ignore[attr-defined]
