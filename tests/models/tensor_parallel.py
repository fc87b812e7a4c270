"""A small Llama that is split over a tensor-parallel mesh by torch's own styles."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEADS, VOCABULARY = 16, 4, 24


def heads(x: torch.Tensor) -> torch.Tensor:
    """`[batch, tokens, width]` to `[batch, heads, tokens, width of a head]`."""
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of all heads, `[batch, tokens, width]`."""
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Causal, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(attended(*(heads(p(x)) for p in (self.q, self.k, self.v))))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Both, each behind a norm."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class Decoder(nn.Module):
    """Token numbers to the loss of predicting them."""

    def __init__(self, layers: Iterable[Block]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Llama(Decoder):
    """One of such blocks."""

    def __init__(self, layers: int = 2, hidden: int = 24) -> None:
        super().__init__(Block(Attention(), FeedForward(hidden)) for _ in range(layers))


def split(model: Llama, mesh: DeviceMesh, *, sequence: bool = False) -> Llama:
    """Splits the model over a mesh: heads, hidden units and vocabulary; with `sequence` the norms' tokens, too."""
    apart, whole = Shard(1), Replicate()
    between = apart if sequence else whole
    layer: dict[str, ParallelStyle] = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=between),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=between),
    }
    outer: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=whole),
    }
    if sequence:
        gathered = PrepareModuleInput(input_layouts=(apart,), desired_input_layouts=(whole,))
        layer |= {"first": SequenceParallel(), "second": SequenceParallel(), "attention": gathered}
        layer["feed_forward"] = gathered
        outer["norm"] = SequenceParallel()
    parallelize_module(model, mesh, outer)
    for block in model.layers:
        parallelize_module(block, mesh, layer)
    return model
