"""Real architectures in small: models of transformers with random weights, and batches for them.

None has dropout: what `torch.compile` makes of it has other bits in bfloat16 than eager, with every backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

VOCABULARY = 97
ROWS, LENGTH = 8, 12


def _ids(step: int, stream: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + stream)
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One configuration."""

    name: str  # of the model's class in transformers
    config: str  # of its configuration's class
    sizes: tuple[tuple[str, Any], ...]  # what the configuration is made with

    def make_model(self) -> nn.Module:
        import transformers

        return getattr(transformers, self.name)(getattr(transformers, self.config)(**dict(self.sizes)))

    def make_batch(self, step: int) -> dict[str, torch.Tensor]:
        """Inputs and labels of all ranks."""
        if self.name.startswith("ViT"):
            generator = torch.Generator().manual_seed(step)
            pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
            return {"pixel_values": pixels, "labels": torch.arange(ROWS) % 5}
        labels = _ids(step, 1) if self.name.startswith("T5") else _ids(step)
        return {"input_ids": _ids(step), "labels": labels}


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def _make(name: str, config: str, **sizes: Any) -> Architecture:
    return Architecture(name, config, tuple(sizes.items()))


ARCHITECTURES = {
    "decoder (Llama)": _make("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **_DECODER),
    "decoder, tied (GPT-2)": _make(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "encoder (BERT)": _make(
        "BertForMaskedLM", "BertConfig", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_DECODER
    ),
    "encoder-decoder (T5)": _make(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    ),
    "vision (ViT)": _make(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=5,
    ),
    "mixture of experts (Mixtral)": _make(
        "MixtralForCausalLM", "MixtralConfig", num_key_value_heads=2, num_local_experts=4, **_DECODER
    ),
}


@dataclasses.dataclass(frozen=True)
class ShardBlocks:
    """`prepare` of a comparison: each block is a unit, and the rest of the model is one."""

    kind: str  # name of the blocks' class
    policy: MixedPrecisionPolicy  # of every unit

    def __call__(self, model: nn.Module, fully_shard: Callable[..., nn.Module]) -> None:
        for module in [m for m in model.modules() if type(m).__name__ == self.kind]:
            fully_shard(module, mp_policy=self.policy)
        fully_shard(model, mp_policy=self.policy)
