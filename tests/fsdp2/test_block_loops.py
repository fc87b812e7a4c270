"""Training scripts that compile their blocks in a loop, with one word changed: `backend="fsdp"`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests import long
from tests.fsdp2.decoder import VOCABULARY, WIDTH, Deep, batch, cross_entropy, gathered_by_hooks
from tests.ranks import on_ranks
from tests.two_sides import MIXED, WithFsdp2, compile_eagerly, compile_in_place

HEADS = 2


class _Checkpointed(Deep):
    def call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)


@pytest.mark.long
@on_ranks()
def test_blocks_of_one_unit_that_are_computed_again() -> None:
    """The model is taken over within the first forward, after FSDP2 has begun to gather that unit."""

    def sharded(model: Any) -> None:
        fully_shard(list(model.blocks))
        fully_shard([model.norm, model.head])
        fully_shard(model)

    def compiled(model: Any) -> None:
        sharded(model)
        for block in model.blocks:
            compile_in_place(block, reduce_layout="fsdp2")

    WithFsdp2(_Checkpointed, sharded, batch, cross_entropy, ours=compiled).train(steps=2)


# A script as torchtitan's: its model, what shards it, and what compiles it.


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, HEADS, -1) for w in (self.wq, self.wk, self.wv))
        q, k = (_turn(each, turns) for each in (q, k))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(2, 3)).float() / (WIDTH // HEADS) ** 0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1).type_as(v)
        return self.wo((weights @ v).transpose(1, 2).reshape(batch, length, -1))


def _turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1], None]).flatten(3).type_as(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = _Attention()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        normed = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class _Transformer(nn.Module):
    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        angles = torch.outer(torch.arange(64), 1 / 100 ** (torch.arange(0, 8, 2) / 8))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.layers = nn.ModuleDict({str(number): _Block() for number in range(3)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        return self.output(self.norm(h))


def _apply_fsdp(model: Any, **settings: Any) -> None:
    fully_shard(model.tok_embeddings, **settings)
    for block in model.layers.values():
        fully_shard(block, **settings)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **settings)
    fully_shard(model, **settings)


@pytest.mark.parametrize("compiles", ["in place", "registered"])
@long.parametrize("dtype", ["fp32", "bf16"], always=["bf16"])
@on_ranks()
def test_a_script_as_torchtitans(compiles: str, dtype: str) -> None:
    settings = {"mp_policy": MIXED} if dtype == "bf16" else {}
    options: dict[str, Any] = {"reduce_layout": "fsdp2", "fullgraph": True}

    def shard(model: Any) -> None:
        _apply_fsdp(model, **settings)

    def parallelize(model: Any) -> None:
        for name, block in model.layers.named_children():
            if compiles == "in place":
                compile_in_place(block, **options)
            else:  # as older ones did
                model.layers.register_module(name, compile_eagerly(block, **options))
        shard(model)

    pair = WithFsdp2(_Transformer, shard, batch, cross_entropy, ours=parallelize)
    if compiles == "registered":  # names of parameters have a part of their own there
        pair.compare_gradients = pair.compare_parameters = lambda *_: None  # type: ignore[method-assign]
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
        with torch.no_grad():
            pair.losses()
        pair.train(pair.call, pair.call, steps=1)
    for mine, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    assert not [title for title in titles[3:] if "layers" in title]
