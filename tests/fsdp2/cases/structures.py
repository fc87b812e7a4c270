"""Structures of models and of units."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import fsdp_compile
from tests.fsdp2.decoder import (
    WIDTH,
    Block,
    Decoder,
    Tied,
    batch,
    case,
    forward_graphs,
    gathered_by_hooks,
    pair_of,
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
        with forward_graphs() as graphs, gathered_by_hooks() as hooked:
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

    pair = pair_of(Generates)
    compiled = pair.compiled()
    pair.train(compiled, steps=1)
    for each in pair:
        register_fsdp_forward_method(each, "score")
    with torch.no_grad():
        assert torch.equal(pair.model.generate(batch(0)), pair.reference.generate(batch(0)))
    pair.reference.reshard()
    assert torch.equal(pair.model.score(batch(1)), pair.reference.score(batch(1)))
    pair.change(lambda model: model.reshard())
    pair.train(compiled, steps=1)
