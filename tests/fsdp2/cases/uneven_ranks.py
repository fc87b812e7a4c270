"""Batches that differ by rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as ck
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.fsdp2.decoder import WIDTH, Block, case, in_parts, pair_of, trains, uncompiled, with_blocks
from tests.two_sides import REDUCED_TWICE, compile_eagerly


@case("uneven_ranks")
def encoder_with_padding() -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    def sharded(model: Any) -> None:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)

    x, mask = torch.randn(2, 6, WIDTH), torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    if dist.get_rank() == 1:
        mask[1] = torch.tensor([True, False, False, False, False, False])
    for compiles in (True, False):
        pair = pair_of(make, sharded=sharded)
        ours = compile_eagerly(pair.model) if compiles else pair.model
        if not compiles:  # taken over all the same
            compile_eagerly(pair.model)(x, src_key_padding_mask=mask)
        for model in (ours, pair.reference):
            model(x, src_key_padding_mask=mask).square().mean().backward()
        pair.compare_gradients(within=REDUCED_TWICE)
        torch.manual_seed(0)
        plain = make().eval()
        pair.model.eval()
        with torch.no_grad():
            made, wanted = ours(x, src_key_padding_mask=mask), plain(x, src_key_padding_mask=mask)
        kept = ~mask[:, : made.shape[1]]
        assert torch.allclose(made[kept], wanted[kept], atol=1e-5)


class _Experts(nn.Module):
    """Experts that are called for the rows which hit them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        chosen = self.gate(flat).argmax(-1)
        made = torch.zeros_like(flat)
        for expert in torch.unique(chosen).tolist():
            rows = torch.where(chosen == expert)[0]
            made = made.index_add(0, rows, flat[rows] @ self.up[expert])
        return x + made.view_as(x)


trains("uneven_ranks", "hit_experts", with_blocks(_Experts), in_parts, uncompiled, within=REDUCED_TWICE, is_long=True)


@case("uneven_ranks")
def empty_batches() -> None:
    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens[: 2 - 2 * (dist.get_rank() % 2)]).square().sum()

    pair = pair_of()
    pair.train(pair.compiled(), loss=loss, steps=3)


class _Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ck.checkpoint(super().forward, x, use_reentrant=False)


@case("uneven_ranks", is_long=True)
def empty_batches_and_checkpoints() -> None:
    for first in (0, 1):  # the step from which on a rank has no rows

        def loss(model: Any, tokens: torch.Tensor, steps: Iterator[int]) -> torch.Tensor:
            rows = 0 if dist.get_rank() % 2 and next(steps) // 2 >= first else 2  # noqa: B023
            return model(tokens[:rows]).square().sum()

        torch.compiler.reset()
        pair = pair_of(with_blocks(_Checkpointed))
        pair.train(pair.compiled(), loss=functools.partial(loss, steps=itertools.count()), steps=3)
