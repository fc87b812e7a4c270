"""A Llama-style language model (RMSNorm, rotary positions, SwiGLU, causal attention).

Shapes are written with B = sequences, T = positions, D = width, H = heads, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""One token per byte value."""
ROTARY_BASE = 10_000.0
INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that decide every parameter of a `Llama`; `width / heads` is even, `seq_len` the longest sequence."""

    width: int
    layers: int
    heads: int
    seq_len: int


class Attention(nn.Module):
    """Causal self-attention with rotary positions, (B, T, D) to (B, T, D)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attends from every position to itself and those before it."""
        query = rotate(self._split(self.query(x)), cos, sin)
        key = rotate(self._split(self.key(x)), cos, sin)
        value = self._split(self.value(x))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, H, T, D / H)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated feed-forward, (B, T, D) to (B, T, D)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden = -(-shape.width * 8 // (3 * 32)) * 32  # 8/3 of the width, as a multiple of 32
        self.gate = nn.Linear(shape.width, hidden, bias=False)
        self.up = nn.Linear(shape.width, hidden, bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the feed-forward to every position by itself."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm transformer layer, (B, T, D) to (B, T, D)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.feed_forward = SwiGLU(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Adds attention, then the feed-forward, to the residual stream."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Byte tokens (B, T) int64 to next-byte logits (B, T, V)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        cos, sin = rotary_table(shape.seq_len, shape.width // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
        # What writes to the residual stream starts smaller, so that its variance does not grow with depth.
        for block in self.blocks:
            assert isinstance(block, Block)
            for linear in (block.attention.output, block.feed_forward.down):
                nn.init.normal_(linear.weight, std=INIT_STD / (2 * shape.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predicts, at every position, the byte that follows."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def rotary_table(seq_len: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (seq_len, head_width) float32 each, of every position's rotation angles."""
    rate = ROTARY_BASE ** -(torch.arange(0, head_width, 2) / head_width)
    angle = torch.outer(torch.arange(seq_len), rate).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair of features (i, i + half) of `x` (B, H, T, D / H) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).type_as(x)
