"""A script as torchtitan's, with one word changed (`backend="fsdp"`): its model, what shards it, what compiles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests import long
from tests.fsdp2.decoder import VOCABULARY, WIDTH, batch, cross_entropy, gathered_by_hooks
from tests.ranks import on_ranks
from tests.two_sides import MIXED, WithFsdp2, compile_eagerly, compile_in_place

pytestmark = pytest.mark.core
HEADS = 2


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
        if rounds:
            register(model, lambda block: torch.compile(block, backend="aot_eager", fullgraph=True))
        _apply_fsdp(model, **settings)

    def register(model: Any, compiled: Callable[[nn.Module], Any]) -> None:
        for name, block in list(model.layers.named_children()):
            model.layers.register_module(name, compiled(block))

    def parallelize(model: Any) -> None:
        if compiles == "registered":  # as older ones did: FSDP2's hooks of the wrapper gather, as with any backend
            register(model, lambda block: compile_eagerly(block, **options))
        else:
            for block in model.layers.values():
                compile_in_place(block, **options)
        _apply_fsdp(model, **settings)

    # From 2.15 on, FSDP2 without a compiler no longer rounds gradients there, and torch's compiler does.
    rounds = compiles == "registered" and torch.__version__ >= "2.15"
    pair = WithFsdp2(_Transformer, shard, batch, cross_entropy, ours=parallelize)
    if compiles == "registered" and not rounds:  # names of parameters have a part of their own there
        pair.compare_gradients = pair.compare_parameters = lambda *_: None  # type: ignore[method-assign]
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
        with torch.no_grad():
            pair.losses()
        pair.train(pair.call, pair.call, steps=1)
    for mine, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    assert not [title for title in titles[3:] if "layers" in title]
