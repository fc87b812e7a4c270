"""A model of transformers gets, part by part, the values of its own initialization."""

from __future__ import annotations

import pytest
import torch

from fsdp_compile import fully_shard, materialize
from tests.models.meta import assert_equal, on_meta
from tests.ranks import on_ranks

transformers = pytest.importorskip("transformers")


def _llama(*, tied: bool) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=61,  # uneven
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.core
@on_ranks()
def test_init_weights_gives_the_values_of_one_process() -> None:
    for tied in (False, True):
        model = on_meta(lambda tied=tied: _llama(tied=tied))  # type: ignore[misc]
        fully_shard(model)
        torch.manual_seed(5)
        materialize(model, param_init_fn=model._init_weights)

        reference = _llama(tied=tied)
        for module in reference.modules():
            module._is_hf_initialized = False  # type: ignore[assignment]
        torch.manual_seed(5)
        reference.init_weights()  # type: ignore[operator]
        assert_equal(model, reference)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.core
@on_ranks()
def test_a_module_that_initializes_its_parts_again_does_so_after_to_empty() -> None:
    model = on_meta(_gpt2)
    fully_shard(model)
    torch.manual_seed(5)
    model.to_empty(device="cpu")
    model.apply(model._init_weights)  # also for modules that have no parameters of their own
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and "ln_" not in name:
            # Attention initializes the weight of its projection again, which is sharded by then.
            wanted = 0.02 / 2 if name.endswith("c_proj.weight") else 0.02
            assert abs(parameter.full_tensor().std().item() / wanted - 1) < 0.1, name


def _gpt2() -> torch.nn.Module:
    """Its attention scales a weight of its projection, after that was initialized."""
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=61, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)
