"""What is trained: Llamas of transformers', and a stack of tiny layers in which only overhead costs time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Forward = Callable[[nn.Module], Any]
"""Runs a model's forward on its inputs and returns its outputs."""
Loss = Callable[[Any], torch.Tensor]
"""The loss out of a model's outputs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaSize:
    """Sizes of a Llama and of its input.

    Attributes:
        layers: Blocks.
        width: Features per token.
        hidden: Inner features of the feed-forward.
        heads: Attention heads.
        key_heads: Heads of keys and values.
        vocabulary: Tokens that there are.
        batch: Sequences per rank.
        tokens: Tokens per sequence.
        head_width: Features of a head; `None` for `width / heads`.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    vocabulary: int
    batch: int
    tokens: int
    head_width: int | None = None


SMOKE = LlamaSize(layers=2, width=64, hidden=128, heads=4, key_heads=2, vocabulary=128, batch=1, tokens=16)
TWO_CORES = LlamaSize(layers=6, width=768, hidden=2048, heads=12, key_heads=12, vocabulary=8192, batch=2, tokens=256)
"""About 55 M parameters; a step takes a second or two on two cores."""
LLAMA_3_8B = LlamaSize(
    layers=32, width=4096, hidden=14_336, heads=32, key_heads=8, vocabulary=128_256, batch=1, tokens=8192
)

LLAMA_3_405B = LlamaSize(
    layers=126, width=16_384, hidden=53_248, heads=128, key_heads=8, vocabulary=128_256, batch=1, tokens=8192
)


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to train and how.

    Attributes:
        make: Makes the model, the same weights each time.
        block: Class of its repeated blocks.
        forward: Runs the forward.
        loss: What is minimized.
        inputs: Arguments and keyword arguments of the forward.
    """

    make: Callable[[], nn.Module]
    block: type[nn.Module]
    forward: Forward
    loss: Loss
    inputs: tuple[tuple[Any, ...], dict[str, Any]]


def llama(size: LlamaSize, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Task:
    """Next-token training of transformers' Llama on random tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    make_config: Any = LlamaConfig  # its arguments are not all declared
    config = make_config(
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        head_dim=size.head_width or size.width // size.heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.tokens,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )

    def make() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = LlamaForCausalLM(config)
        return model.to(dtype)

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(size.vocabulary, (size.batch, size.tokens), generator=generator).to(device)
    keywords = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return Task(make, LlamaDecoderLayer, lambda model: model(**keywords), lambda out: out.loss, ((), keywords))


def llama_3_8b() -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """For `fsdp-compile explain benchmarks.models:llama_3_8b`: one sequence of 8192, on meta."""
    task = llama(LLAMA_3_8B, device="meta")
    return (task.make(), *task.inputs)


def llama_3_405b() -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """For `fsdp-compile plan benchmarks.models:llama_3_405b`: one sequence of 8192, on meta."""
    task = llama(LLAMA_3_405B, device="meta")
    return (task.make(), *task.inputs)


def llama_3_405b_4k() -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """The same with a sequence of 4096."""
    task = llama(dataclasses.replace(LLAMA_3_405B, tokens=4096), device="meta")
    return (task.make(), *task.inputs)


class TinyLayer(nn.Module):
    """Five small parameters: two linear layers and a scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds to the residual stream, (B, width) to (B, width)."""
        return x + self.down(torch.relu(self.up(x))) * self.scale


def tiny_stack(layers: int, width: int = 16) -> Task:
    """Layers so small that the time of a step is the host's."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(TinyLayer(width) for _ in range(layers)))

    x = torch.randn(4, width, generator=torch.Generator().manual_seed(1))
    return Task(make, TinyLayer, lambda model: model(x), lambda out: out.square().mean(), ((x,), {}))


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters of a plain model."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
