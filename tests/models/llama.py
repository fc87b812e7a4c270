"""A small Llama of transformers."""

from __future__ import annotations

from typing import Any


def config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(**{"vocab_size": 64, "num_key_value_heads": 2, **sizes, **changes})


def model(**changes: Any) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(config(**changes))
