"""Layers as Llama has them: three norms' worth of small parameters beside seven large matrices per layer."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn.functional import silu


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a model and its batch; the defaults are those of Llama-3-8B with two layers."""

    layers: int = 2
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256
    tokens: int = 4096

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SMALL = Sizes(width=1024, hidden=2048, heads=8, key_heads=4, vocabulary=4096, tokens=512)
"""Large enough for every matrix to be a message of its own at 8 ranks."""


class Attention(nn.Module):
    """Rotated queries and keys, and fewer keys than queries."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        keys = sizes.head_width * sizes.key_heads
        self.q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.k = nn.Linear(sizes.width, keys, bias=False)
        self.v = nn.Linear(sizes.width, keys, bias=False)
        self.o = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        rows, tokens, _ = x.shape
        q = self.q(x).view(rows, tokens, sizes.heads, -1).transpose(1, 2)
        k = self.k(x).view(rows, tokens, sizes.key_heads, -1).transpose(1, 2)
        v = self.v(x).view(rows, tokens, sizes.key_heads, -1).transpose(1, 2)
        q, k = _rotated(q, cosines, sines), _rotated(k, cosines, sines)
        k, v = (each.repeat_interleave(sizes.heads // sizes.key_heads, 1) for each in (k, v))
        # F.scaled_dot_product_attention asks a driver, in C++, which kernel to take.
        half = torch.bfloat16
        q, k, v = q.to(half), k.to(half), v.to(half)
        done = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        return self.o(done.to(x.dtype).transpose(1, 2).reshape(rows, tokens, -1))


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return (x * cosines + torch.cat((-b, a), -1) * sines).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.width, eps=1e-5), nn.RMSNorm(sizes.width, eps=1e-5)
        self.attention = Attention(sizes)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cosines, sines)
        h = self.norm2(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cosines, sines)
        return self.head(self.norm(x))
