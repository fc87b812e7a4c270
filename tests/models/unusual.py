"""Models that reach their parameters in unusual ways, or whose parameters are unusual themselves."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_compile._torch.fully_shard import has_group_lists
from tests.models.kinds import WIDTH, Stack, StackOfThree

WIDE = torch.float64 if has_group_lists() else torch.float32
"""Of parameters beside float32: units of torch 2.11 have one dtype."""


class ReadsOfAnother(Stack):
    """The last block's output goes through the first block's weight: a parameter that two units use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        first: nn.Linear = self.blocks[0].up  # type: ignore[assignment]
        x = x + F.gelu(F.linear(x, first.weight)) @ first.weight
        return self.head(x)


class TiedBlocks(StackOfThree):
    """The last block shares a weight with the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]


class LowRank(nn.Module):
    """A frozen layer with a trained low-rank update."""

    def __init__(self, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, WIDTH) / 6)
        self.b = nn.Parameter(torch.zeros(WIDTH, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class LowRankStack(nn.Module):
    """Frozen blocks with trained low-rank updates between them, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(LowRank(), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class SeveralDtypes(nn.Module):
    """One unit with parameters of two dtypes, and frozen ones of two others."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=WIDE)
        self.low = nn.Parameter(torch.full((WIDTH,), 1.25, dtype=torch.bfloat16), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(torch.tanh(self.single(x)).to(WIDE)).float()
        return x[:, self.order] * self.low.float()


class Cells(nn.Module):
    """Recurrent cells, unrolled in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.lstm, self.gru = nn.RNNCell(8, 9), nn.LSTMCell(9, 10), nn.GRUCell(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = a = b = None
        for part in x.view(-1, 4, 8).unbind(1)[:2]:
            a = self.rnn(part, a)
            h, c = self.lstm(a, None if h is None else (h, c))
            b = self.gru(h, b)
        assert b is not None
        return b


class Recurrent(nn.Module):
    """Torch's own recurrent layers, after a layer that Dynamo compiles; they keep a list of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(14, 5, batch_first=True)
        self.rnn = nn.RNN(5, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(self.inner(x.view(-1, 4, 8)))
        y, _ = self.gru(y)
        return self.rnn(y)[0].mean(1)


class RecurrentFirst(nn.Module):
    """A recurrent layer alone, which Dynamo leaves to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 7, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.view(-1, 4, 8))[0].mean(1)


class Squash(torch.autograd.Function):
    """A linear layer and tanh with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight.t())
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, y = ctx.saved_tensors
        inner = grad * (1 - y * y)
        return inner @ weight, inner.t() @ x


class CustomFunction(Stack):
    """Parameters are arguments of a custom autograd function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return Squash.apply(x, self.head.weight)


class Penalty(Stack):
    """The output contains the sum of squares of all the model's parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        return super().forward(x) + 1e-3 * penalty


class PenaltyOfBlocks(Stack):
    """Only a child's parameters are listed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        penalty = sum(p.abs().sum() for _, p in self.blocks.named_parameters())
        return super().forward(x) + 1e-3 * penalty


class OwnForward(Stack):
    """Instances have their own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head.forward = types.MethodType(_minus_bias, self.head)  # type: ignore[method-assign]


def _minus_bias(head: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, head.weight) - head.bias


class TwoOutputs(Stack):
    """A part of the model whose result nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.last = self.other(x).detach()
        return self.head(x)


class Experts(nn.Module):
    """A mixture of experts: each row goes to one expert; every expert is called, with no rows if it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        chosen = gates.argmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == i).squeeze(1)
            y = y.index_add(0, rows, expert(x[rows]) * gates[rows, i, None])
        return self.head(x + y)


class DenseExperts(Experts):
    """The same with fixed shapes: every expert sees every row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        mask = F.one_hot(gates.argmax(-1), 4)
        y = sum(expert(x) * (gates * mask)[:, i, None] for i, expert in enumerate(self.experts))
        return self.head(x + y)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "reads-of-another": ReadsOfAnother,
    "tied-blocks": TiedBlocks,
    "low-rank": LowRankStack,
    "several-dtypes": SeveralDtypes,
    "cells": Cells,
    "recurrent": Recurrent,
    "recurrent-first": RecurrentFirst,
    "custom-function": CustomFunction,
    "penalty": Penalty,
    "penalty-of-blocks": PenaltyOfBlocks,
    "own-forward": OwnForward,
    "two-outputs": TwoOutputs,
    "experts": Experts,
    "dense-experts": DenseExperts,
}
