"""Structures of models and of units, and batches that differ by rank."""

from __future__ import annotations

import functools
import itertools
from abc import ABC
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint as ck
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import fsdp_compile
from fsdp_compile.ir.graph import Phase
from tests.fsdp2.decoder import (
    WIDTH,
    Block,
    Decoder,
    Tied,
    batch,
    case,
    compiled_graphs,
    gathered_by_hooks,
    in_parts,
    pair_of,
    trained,
    trains,
    uncompiled,
    whole,
    with_blocks,
)
from tests.two_sides import REDUCED_TWICE, compile_eagerly, compile_in_place


def _make_sequential() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, WIDTH), Block(), Block(), nn.Linear(WIDTH, 50))


def _shard_sequential(model: Any) -> None:
    fully_shard(model[1])
    fully_shard(model[2])
    fully_shard(model)


@case("structures")
def containers_of_torch() -> None:
    for in_place in (False, True):
        pair = pair_of(_make_sequential, sharded=_shard_sequential)
        compile_in_place(pair.model)
        with compiled_graphs(Phase.FORWARD) as graphs, gathered_by_hooks() as hooked:
            pair.train(pair.model if in_place else compile_eagerly(pair.model))
        if in_place and torch.__version__.startswith("2.11"):  # which starts no graph there: FSDP2 has run it
            assert not graphs
            continue
        assert graphs
        # In place, torch starts graphs in the modules of other classes alone, and FSDP2 runs the outermost one.
        assert set(hooked) <= ({"(root)"} if in_place else set()), (in_place, hooked)


@case("structures", is_long=True)
def compiled_blocks_between_the_modules_of_a_unit() -> None:
    """The first compile comes when one of them has run, and the other has not."""
    pair = pair_of(Tied)
    for block in pair.model.blocks:
        compile_in_place(block)
    pair.train(pair.model)


def _several(model: Any) -> None:
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard([model.norm, model.head])
    fully_shard(model)


def _nested(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block.a)
        fully_shard(block)
    fully_shard(model)


class _Twice(Decoder):
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


class _Abstract(ABC, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x @ self.weight


def _shard_abstract(model: Any) -> None:
    for block in model.blocks:  # torch's own call cannot: "object layout differs"
        fsdp_compile.fully_shard(block)
    fully_shard(model)


class _Asks(Decoder):
    """Whether it is managed."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (2 if getattr(self, "_is_fsdp_managed_module", False) else 1)


class _Reads(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made = super().forward(tokens)
        named = dict(self.named_parameters())
        taken = named["norm.weight"].sum() + self.norm.get_parameter("bias").sum()
        first = next(self.blocks[0].parameters())
        count = sum(p.numel() for p in self.parameters())
        return made + taken + first.sum() + count / 1e6


trains("structures", "units_of_several_modules", Decoder, whole, uncompiled, sharded=_several, is_long=True)
trains("structures", "nested_units", Decoder, whole, uncompiled, sharded=_nested)
trains("structures", "a_unit_called_twice", _Twice, whole, uncompiled, within=REDUCED_TWICE)
trains("structures", "abstract_classes", with_blocks(_Abstract), sharded=_shard_abstract, is_long=True)
trains("structures", "marks_of_managed_modules", _Asks, is_long=True)
trains("structures", "reads_in_forwards", _Reads, sharded=fully_shard, within=REDUCED_TWICE, is_long=True)


@case("structures", is_long=True)
def names_of_classes() -> None:
    pair = pair_of()
    before = {name: type(m) for name, m in pair.model.named_modules()}
    pair.train(pair.compiled(), steps=1)
    for name, module in pair.model.named_modules():
        for attribute in ("__name__", "__qualname__", "__module__"):
            assert getattr(type(module), attribute) == getattr(before[name], attribute)
    assert type(pair.model.norm).__name__ == "LayerNorm"
    assert isinstance(pair.model.norm, nn.LayerNorm)
    assert pair.model._is_fsdp_managed_module is True


@case("structures")
def returned_parameters() -> None:
    class Returns(Decoder):
        def forward(self, tokens: torch.Tensor) -> Any:
            return super().forward(tokens), self.norm.weight

    pair = pair_of(Returns)

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        made, weight = model(tokens)
        return F.cross_entropy(made.flatten(0, 1), tokens.flatten()) + 0.1 * weight.square().sum()

    pair.train(pair.compiled(), loss=loss, within=REDUCED_TWICE)


@case("structures")
def forward_methods() -> None:
    class Generates(Decoder):
        def generate(self, tokens: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
            return tokens

        def score(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.norm(self.embedding(tokens)).sum()

    pair = trained(Generates)
    for each in pair:
        register_fsdp_forward_method(each, "score")
    with torch.no_grad():
        assert torch.equal(pair.model.generate(batch(0)), pair.reference.generate(batch(0)))
    pair.reference.reshard()
    assert torch.equal(pair.model.score(batch(1)), pair.reference.score(batch(1)))
    pair.change(lambda model: model.reshard())
    pair.train(steps=1)


# Batches that differ by rank.


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
