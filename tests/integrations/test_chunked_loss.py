"""Losses over chunks of the logits read the head's weight several times: as TRL does it, and as torchtitan does it."""

from __future__ import annotations

import copy
import enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from fsdp_compile import explain, fully_shard
from fsdp_compile.cost.communicate import Kind
from fsdp_compile.ir.graph import Phase
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import close, compile_eagerly

VOCABULARY, WIDTH, CHUNKS = 12, 8, 3


class Chunked(enum.Enum):
    """Where the chunks are made, each of which recomputes its logits in backward but outside."""

    BY_ARGUMENT = "by argument"
    """In the forward, which gives each chunk its head's weight, as TRL does."""
    BY_WEIGHT = "by weight"
    """In the forward; each chunk reads the weight."""
    BY_MODULE = "by module"
    """In the forward; each chunk calls the head."""
    OUTSIDE = "outside"
    """The model returns hidden states; the head is called and differentiated chunk by chunk, as torchtitan does."""


class _Model(nn.Module):
    def __init__(self, where: Chunked, *, tied: bool) -> None:
        super().__init__()
        self.where = where
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(self.embedding(rows)))
        if self.where is Chunked.OUTSIDE:
            return hidden
        weight = self.head.weight if self.where is Chunked.BY_ARGUMENT else None
        parts = zip(hidden.chunk(CHUNKS, 1), labels.chunk(CHUNKS, 1), strict=True)
        return torch.stack([checkpoint(self.loss, *part, weight, use_reentrant=False) for part in parts]).sum()

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        if self.where is Chunked.BY_WEIGHT:
            weight = self.head.weight
        logits = self.head(hidden) if weight is None else linear(hidden, weight)
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 36


def _step(model: Any, called: Any, rows: torch.Tensor, scale: int) -> torch.Tensor:
    """Forward and backward; `rows` are one part in `scale` of the batch."""
    labels = rows.roll(-1, 1)
    result: torch.Tensor = called(rows, labels)
    if model.where is not Chunked.OUTSIDE:
        (result * scale).backward()
        return result.detach()
    parts = [part.detach().requires_grad_() for part in result.chunk(CHUNKS, 1)]
    if isinstance(model.head, FSDPModule):  # gathered once for all chunks
        model.head.set_reshard_after_forward(False)
        model.head.set_reshard_after_backward(False)
    total = torch.zeros(())
    for part, wanted in zip(parts, labels.chunk(CHUNKS, 1), strict=True):
        loss = model.loss(part, wanted)
        (loss * scale).backward()
        total += loss.detach()
    if isinstance(model.head, FSDPModule):
        model.head.set_reshard_after_forward(True)
        model.head.set_reshard_after_backward(True)
        model.head.reshard()
    gradients: list[Any] = [part.grad for part in parts]
    result.backward(torch.cat(gradients, 1))
    return total


@long.parametrize(
    ("where", "tied", "compiled"),
    [
        (Chunked.BY_ARGUMENT, False, True),
        (Chunked.BY_ARGUMENT, True, True),
        (Chunked.BY_ARGUMENT, True, False),
        (Chunked.OUTSIDE, False, True),
        (Chunked.OUTSIDE, False, False),
    ],
    always=[(Chunked.BY_ARGUMENT, True, True), (Chunked.OUTSIDE, False, True)],
)
@on_ranks()
def test_chunks_equal_one_process(where: Chunked, *, tied: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    model: Any = _Model(where, tied=tied)
    reference = copy.deepcopy(model)
    if not tied:
        fully_shard(model.head)
    fully_shard(model)
    called = compile_eagerly(model) if compiled else model
    world, rank = dist.get_world_size(), dist.get_rank()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    for number in range(2):
        rows = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(number))
        loss = _step(model, called, rows.chunk(world)[rank], world)
        expected = _step(reference, reference, rows, 1)
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, expected)
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(mine.grad.full_tensor(), theirs.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("prefetch", ["auto", 1])
@pytest.mark.parametrize("where", [Chunked.BY_MODULE, Chunked.BY_WEIGHT])
def test_the_head_is_gathered_once_per_pass_and_not_once_per_chunk(where: Chunked, prefetch: Any) -> None:
    with torch.device("meta"):
        model, rows = _Model(where, tied=False), torch.zeros(4, 9, dtype=torch.long)
    options = {"lower": "eager", "bucket_mb": 0, "prefetch": prefetch, "reshard_after_forward": True}
    plan = explain(model, rows, rows, world_size=4, options=options)
    for graph in plan.graphs:
        read = [name for c in graph.collectives if c.kind is Kind.GATHER for name in c.parameters]
        assert read.count("head.weight") == 1, f"{CHUNKS} chunks, each checkpointed, in {graph.phase.value}"
        made_once = [name for c in graph.collectives if c.kind is Kind.REDUCE for name in c.parameters]
        assert made_once.count("head.weight") == (graph.phase is Phase.BACKWARD), "and so is its gradient reduced"


# Uncompiled, a head that is a unit of its own is not gathered where the outermost forward reads its weight (FSDP2).
