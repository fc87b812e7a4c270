"""A Llama of transformers: training, recorded hidden states, and `generate()`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fsdp2.decoder import batch, case, gathered_by_hooks, pair_of
from tests.two_sides import MIXED, REDUCED_TWICE, WithFsdp2, compile_in_place

VOCABULARY = 64


def _make(*, ties: bool = False, attention: str = "sdpa") -> nn.Module:
    config_class: Any = LlamaConfig
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=ties,
        attn_implementation=attention,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def _shard(model: Any, **settings: Any) -> None:
    model.tie_weights()
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@case("llama")
def trains_in_one_graph() -> None:
    for ties in (False, True):
        pair = pair_of(functools.partial(_make, ties=ties), sharded=_shard)
        with gathered_by_hooks() as hooked:
            # Eager code computes attention's gradients in another order than AOTAutograd's graphs.
            pair.train(pair.compiled(), other=torch.compile(pair.reference, backend="aot_eager"), loss=_loss)
        assert not hooked, hooked


@case("llama", is_long=True)
def trains_in_mixed_precision() -> None:
    pair = pair_of(_make, sharded=_shard, mp_policy=MIXED)
    pair.train(pair.compiled(), other=torch.compile(pair.reference, backend="aot_eager"), loss=_loss)


@case("llama", is_long=True)
def layers_one_by_one() -> None:
    for settings in ({}, {"mp_policy": MIXED}):

        def looped(model: Any, settings: dict[str, Any] = settings) -> None:
            _shard(model, **settings)
            for layer in model.model.layers:
                compile_in_place(layer, reduce_layout="fsdp2")

        make = functools.partial(_make, attention="eager")
        pair = WithFsdp2(make, functools.partial(_shard, **settings), batch, _loss, ours=looped)
        with gathered_by_hooks() as titles:
            pair.train(steps=3)
        assert not [title for title in titles[3:] if "layers" in title]


@case("llama", is_long=True)
def records_hidden_states() -> None:
    pair = pair_of(_make, sharded=_shard)
    tokens = torch.arange(24).view(2, 12)
    for in_place in (False, True):
        if in_place:
            compile_in_place(pair.model)
        ours = pair.model if in_place else pair.compiled(fullgraph=False)
        for _ in range(2):
            with torch.no_grad():
                made, wanted = (each(input_ids=tokens, output_hidden_states=True) for each in (ours, pair.reference))
            assert len(made.hidden_states) == len(wanted.hidden_states) == 3
            for a, b in zip(made.hidden_states, wanted.hidden_states, strict=True):
                assert torch.equal(a, b)


@case("llama", is_long=True)
def generates_different_lengths() -> None:
    pair = pair_of(_make, sharded=_shard)
    torch.manual_seed(0)
    plain: Any = _make()
    pair.train(pair.compiled(), loss=_loss, steps=1, within=REDUCED_TWICE)
    plain.load_state_dict({name: p.full_tensor() for name, p in pair.model.state_dict().items()})
    prompt = torch.arange(3, 7 if dist.get_rank() == 0 else 13)[None]
    made = pair.model.generate(prompt, max_length=16, do_sample=False)
    assert torch.equal(made, plain.generate(prompt, max_length=16, do_sample=False))
