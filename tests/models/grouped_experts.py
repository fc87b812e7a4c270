"""Mixtral and DeepSeek-V3 in small: routed experts whose matrices are 3-D parameters, and one grouped matmul for each.

Tokens are sorted by their experts, so that an expert's are rows next to each other, and the ends of the experts' rows
say where each begins. An expert may have none.
"""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH, HIDDEN, EXPERTS, CHOSEN = 24, 16, 16, 4, 2


def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows times the matrix of their expert.

    Args:
        rows: `[n, in]`, in the order of experts.
        matrices: `[experts, in, out]`.
        ends: `[experts]`: how many rows there are up to each expert's last, int32.
    """
    if rows.dtype is torch.bfloat16:  # what torch traces has no other dtype
        return torch._grouped_mm(rows, matrices, offs=ends)
    numbers = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(ends, numbers, right=True)
    return torch.bmm(rows[:, None], matrices[expert])[:, 0]


class GroupedExperts(nn.Module):
    """Gated; three 3-D parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.silu(grouped_mm(rows, self.gate, ends)) * grouped_mm(rows, self.up, ends)
        return grouped_mm(hidden, self.down, ends)


class MixtureOfExperts(nn.Module):
    """Each token goes to the `CHOSEN` experts that it scores highest, and perhaps to a shared one."""

    def __init__(self, *, is_shared: bool, bias: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = GroupedExperts()
        self.shared = FeedForward() if is_shared else None
        if bias:  # balances loads without a gradient, as DeepSeek-V3's
            self.register_buffer("bias", torch.linspace(-0.1, 0.1, EXPERTS))
        self.has_bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).float()
        if self.has_bias:
            scores = scores.sigmoid()
            chosen = (scores + self.bias).topk(CHOSEN, dim=-1).indices
        else:
            scores = scores.softmax(-1)
            chosen = scores.topk(CHOSEN, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        loads = nn.functional.one_hot(chosen.flatten(), EXPERTS).sum(0)  # `bincount` has no fixed size in a graph
        done = self.experts(tokens[order // CHOSEN], loads.cumsum(0).to(torch.int32))
        mixed = torch.zeros_like(done).index_copy(0, order, done).unflatten(0, (-1, CHOSEN))
        out = (mixed * weights[..., None]).sum(1)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)


class FeedForward(nn.Module):
    """Gated."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Grouped queries: two heads of keys and values for four of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, -1)).transpose(1, 2).chunk(2, dim=1)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Keys and values come from a small vector for each token, queries from another one; with norms between."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_norm = nn.Linear(WIDTH, 8, bias=False), nn.RMSNorm(8)
        self.q_up = nn.Linear(8, WIDTH, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(WIDTH, 8, bias=False), nn.RMSNorm(8)
        self.kv_up = nn.Linear(8, 2 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (4, -1)).transpose(1, 2)
        latent = self.kv_up(self.kv_norm(self.kv_down(x)))
        k, v = latent.unflatten(-1, (4, -1)).transpose(1, 2).chunk(2, dim=-1)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and experts, each behind a norm."""

    def __init__(self, attention: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, experts
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class Decoder(nn.Module):
    """Token numbers to the loss of predicting them."""

    def __init__(self, layers: list[Block]) -> None:
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


def mixtral() -> Decoder:
    """Every layer has routed experts."""
    return Decoder([Block(Attention(), MixtureOfExperts(is_shared=False, bias=False)) for _ in range(2)])


def deepseek() -> Decoder:
    """The first layer is dense, the second has a shared expert and routed ones; attention is latent."""
    experts = MixtureOfExperts(is_shared=True, bias=True)
    return Decoder([Block(LatentAttention(), FeedForward()), Block(LatentAttention(), experts)])
