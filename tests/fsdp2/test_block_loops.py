"""Training scripts that compile their blocks in a loop, with one word changed: `backend="fsdp"`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests import long
from tests.fsdp2.blocks import Deep, by_blocks
from tests.fsdp2.decoder import batch, cross_entropy, gathered_by_hooks, pair_of, shard
from tests.ranks import run_ranks
from tests.two_sides import REDUCED_TWICE, WithFsdp2, compile_in_place

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: Any = {"lower": "eager", "reduce_layout": "fsdp2"}
WIDTH, HEADS, VOCABULARY = 16, 2, 50


class _Checkpointed(Deep):
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _listed() -> None:
    def sharded(model: Any) -> None:
        fully_shard(list(model.blocks))
        fully_shard([model.norm, model.head])
        fully_shard(model)

    def compiled(model: Any) -> None:
        sharded(model)
        for block in model.blocks:
            block.compile(backend="fsdp", options=OPTIONS)

    WithFsdp2(_Checkpointed, sharded, batch, cross_entropy, ours=compiled).train(steps=2)


@pytest.mark.long
def test_blocks_of_one_unit_that_are_computed_again() -> None:
    """The model is taken over within the first forward, after FSDP2 has begun to gather that unit."""
    run_ranks(_listed)


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
        logits: torch.Tensor = self.output(self.norm(h))
        return logits


def _apply_fsdp(model: Any, **settings: Any) -> None:
    fully_shard(model.tok_embeddings, **settings)
    for block in model.layers.values():
        fully_shard(block, **settings)
    fully_shard([model.norm, model.output], reshard_after_forward=False, **settings)
    fully_shard(model, **settings)


def _apply_compile(model: Any) -> None:
    for block in model.layers.values():
        block.compile(backend="fsdp", options=OPTIONS, fullgraph=True)


def _apply_older_compile(model: Any) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, backend="fsdp", options=OPTIONS, fullgraph=True))


def _parallelize(model: Any, compiles: Callable[[Any], None], **settings: Any) -> None:
    compiles(model)
    _apply_fsdp(model, **settings)


def _torchtitan(name: str, settings: dict[str, Any]) -> None:
    compiles = {"in place": _apply_compile, "registered": _apply_older_compile}[name]

    def eager(model: Any) -> None:
        _apply_fsdp(model, **settings)

    pair = WithFsdp2(
        _Transformer, eager, batch, cross_entropy, ours=lambda model: _parallelize(model, compiles, **settings)
    )
    if name == "registered":  # names of parameters have a part of their own there
        pair.compare_gradients = pair.compare_parameters = lambda *_: None  # type: ignore[method-assign]
    pair.optimize(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
        with torch.no_grad():
            pair.losses()
        pair.train(pair.call, pair.call, steps=1)
    for mine, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    assert not [title for title in titles[3:] if "layers" in title]


@pytest.mark.parametrize("compiles", ["in place", "registered"])
@long.parametrize("dtype", ["fp32", "bf16"], always=["bf16"])
def test_a_script_as_torchtitans(compiles: str, dtype: str) -> None:
    run_ranks(_torchtitan, compiles, {"mp_policy": BF16} if dtype == "bf16" else {})


# transformers.


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config_class: Any = LlamaConfig
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        pad_token_id=0,
    )
    made: nn.Module = LlamaForCausalLM(config)
    return made


def _labelled(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _transformers(settings: dict[str, Any]) -> None:
    def sharded(model: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)

    def looped(model: Any) -> None:
        sharded(model)
        for layer in model.model.layers:
            layer.compile(backend="fsdp", options=OPTIONS)

    pair = WithFsdp2(_llama, sharded, batch, _labelled, ours=looped)
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert not [title for title in titles[3:] if "layers" in title]


@long.parametrize("dtype", ["fp32", "bf16"], always=[])
def test_a_llama_of_transformers(dtype: str) -> None:
    pytest.importorskip("transformers")
    run_ranks(_transformers, {"mp_policy": BF16} if dtype == "bf16" else {})


# Roots that Dynamo cannot trace, and lengths that change.


class _Broken(Deep):
    """Its root's code has graph breaks: it prints, looks at a value, and calls what no compiler knows."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if x.detach().sum().item() > 1e9 or number < 0:
                break
            torch._dynamo.graph_break()
            x = self.call(block, x)
        return x


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _breaks() -> int:
    torch._dynamo.utils.counters.clear()
    pair = by_blocks(pair_of(_Broken))
    with gathered_by_hooks() as titles:
        pair.train(steps=3)
    assert set(titles) == {"(root)"}
    return _graphs()


def test_graph_breaks_in_the_root() -> None:
    assert run_ranks(_breaks) == [3, 3]


def _lengths() -> tuple[int, int, int]:
    def lengths(step: int) -> torch.Tensor:
        return batch(step, (2, 5 + 3 * (step % 6)))

    def looped(model: Any, compiles: Callable[[Any], object]) -> None:
        shard(model)
        for block in model.blocks:
            compiles(block)

    counts = []
    for compiles in (compile_in_place, lambda block: block.compile(backend="aot_eager"), None):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        ours = shard if compiles is None else functools.partial(looped, compiles=compiles)
        pair = WithFsdp2(Deep, shard, lengths, cross_entropy, ours=ours)
        if compiles is None:
            by_blocks(pair)
        pair.train(steps=12, within=REDUCED_TWICE)
        counts.append(_graphs())
    return counts[0], counts[1], counts[2]


@pytest.mark.long
def test_lengths_that_change_compile_no_more_than_with_fsdp2() -> None:
    """Block by block the embedding and the head are compiled, too, for each number of dimensions that changes."""
    for looped, theirs, by_blocks_ in run_ranks(_lengths):
        assert looped <= theirs
        assert by_blocks_ <= theirs + 2 * theirs
