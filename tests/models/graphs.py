"""Small models, one per way in which parameters are stored or used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.layers import InARow, Residual


class Block(Residual):
    def __init__(self, width: int = 64) -> None:
        super().__init__(width, 4 * width)


class Stack(InARow):
    def __init__(self, depth: int = 3, width: int = 64) -> None:
        super().__init__(Block(width) for _ in range(depth))


class Tied(nn.Module):
    """Embedding and head share one parameter; the root's norm stands at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 64)
        self.norm = nn.LayerNorm(64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(64, 97, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tables(nn.Module):
    """Two embeddings of one unit, one of them with rows that do not divide, between them and the head a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(97, 64, padding_idx=3)
        self.places = nn.Embedding(8, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 97, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.tokens(ids) + self.places(ids % 8)))


class Repeated(nn.Module):
    """One module is called twice, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(F.relu(self.second(F.relu(self.first(x)))))


class Uneven(nn.Module):
    """Rows that do not divide, fewer rows than ranks, an empty parameter and a 0-d one."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(7, 13)
        self.few = nn.Linear(13, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.few(self.odd(x)) * self.scale, self.none])


class Partial(nn.Module):
    """A frozen layer, an unused layer, a layer that only the second output reads."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(requires_grad=False)
        self.trained = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 64)
        self.side = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trained(F.relu(self.frozen(x)))
        return x, self.side(x)


class Fused(nn.Module):
    """Splits a weight into views before it is used, as fused attention projections do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192, bias=False)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv.weight.chunk(3)
        attended = torch.softmax((x @ q.t()) @ (x @ k.t()).t(), -1) @ (x @ v.t())
        return self.out(attended)


class Unused(nn.Module):
    """Two layers whose biases nobody reads, so that their flat gradients have gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.relu(F.linear(x, self.first.weight)), self.second.weight)


class Twins(nn.Module):
    """Two models of one class, whose modules and parameters have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Stack(2)
        self.right = Stack(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(self.left(x))


class _GradientIsTheInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (weight,) = ctx.saved_tensors
        del grad
        return weight


class WeightAsGradient(nn.Module):
    """The gradient of a parameter is the gathered parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(F.linear(x, _GradientIsTheInput.apply(self.first.weight))))


class ReturnsWeight(nn.Module):
    """The model's own result is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), self.layer.weight


class Convolution(nn.Module):
    """Convolution and batch norm, whose buffers the graph mutates."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Mixed(nn.Module):
    """A frozen layer, dropout, attention, a division of the batch, slices with steps, a cast and an infinite bound."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(requires_grad=False)
        self.used = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.used(self.frozen(x)), 0.25).view(x.shape[0] // 2, 2, 16)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return torch.cat([y[..., 1::2], y[..., ::2].to(torch.float64).float()], 2).clamp(max=float("inf"))


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "stack": (Stack, lambda: (_rows(4, 64),)),
    "tied": (Tied, lambda: (torch.arange(12).view(3, 4),)),
    "tables": (Tables, lambda: (torch.arange(12).view(3, 4),)),
    "norms": (lambda: nn.Sequential(*(nn.LayerNorm(64) for _ in range(4))), lambda: (_rows(4, 64),)),
    "repeated": (Repeated, lambda: (_rows(4, 64),)),
    "uneven": (Uneven, lambda: (_rows(4, 7),)),
    "partial": (Partial, lambda: (_rows(4, 64),)),
    "fused": (Fused, lambda: (_rows(4, 64),)),
    "unused": (Unused, lambda: (_rows(4, 64),)),
    "twins": (Twins, lambda: (_rows(4, 64),)),
    "weight-as-gradient": (WeightAsGradient, lambda: (_rows(4, 64),)),
    "returns-weight": (ReturnsWeight, lambda: (_rows(4, 64),)),
    "mixed": (Mixed, lambda: (_rows(6, 16),)),
    "convolution": (Convolution, lambda: (_rows(2, 3, 8, 8),)),
}
