"""Mixtral and DeepSeek-V3 in small: routed experts whose matrices are 3-D parameters, and one grouped matmul for each.

Tokens are sorted by their experts, so that an expert's are rows next to each other, and the ends of the experts' rows
say where each begins. An expert may have none.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.models.tensor_parallel import WIDTH, Block, Decoder, FeedForward, attended, heads

HIDDEN, EXPERTS, CHOSEN = 16, 4, 2


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
        self.shared = FeedForward(HIDDEN) if is_shared else None
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


class GroupedAttention(nn.Module):
    """Two heads of keys and values for four of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = (part.repeat_interleave(2, dim=1) for part in heads(self.kv(x)).chunk(2, dim=1))
        return self.o(attended(heads(self.q(x)), k, v))


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
        q, latent = self.q_norm(self.q_down(x)), self.kv_norm(self.kv_down(x))
        k, v = heads(self.kv_up(latent)).chunk(2, dim=1)
        return self.o(attended(heads(self.q_up(q)), k, v))


def mixtral() -> Decoder:
    """Every layer has routed experts."""
    return Decoder(Block(GroupedAttention(), MixtureOfExperts(is_shared=False, bias=False)) for _ in range(2))


def deepseek() -> Decoder:
    """The first layer is dense, the second has a shared expert and routed ones; attention is latent."""
    experts = MixtureOfExperts(is_shared=True, bias=True)
    return Decoder([Block(LatentAttention(), FeedForward(HIDDEN)), Block(LatentAttention(), experts)])
