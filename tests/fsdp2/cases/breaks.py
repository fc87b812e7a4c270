"""Graph breaks and activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as ck
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from tests.fsdp2.decoder import (
    WIDTH,
    Block,
    Decoder,
    batch,
    case,
    cross_entropy,
    gathered_by_hooks,
    in_parts,
    pair_of,
    trains,
    uncompiled,
    with_blocks,
)
from tests.two_sides import REDUCED_TWICE, compile_eagerly, compile_in_place, sgd

# Graph breaks.


class _BreakingBlock(Block):
    breaks = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.n(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.b(torch.relu(self.a(x)))


_Breaking = with_blocks(_BreakingBlock)


def _but_one(model: Any) -> None:
    model.blocks[0].breaks = False


trains("breaks", "in_blocks", _Breaking, in_parts, within=REDUCED_TWICE)
trains("breaks", "in_one_block", _Breaking, in_parts, prepare=_but_one, within=REDUCED_TWICE, is_long=True)


@case("breaks", is_long=True)
def in_blocks_of_a_compiled_step() -> None:
    for dynamic in (False, True):
        torch.compiler.reset()
        pair = pair_of(_Breaking)
        pair.optimize(sgd)
        steps = []
        for model, optimizer in zip(pair, pair.optimizers[0], strict=True):

            def step(tokens: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
                loss = cross_entropy(model, tokens)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            steps.append(step)
        compiled = compile_eagerly(steps[0], dynamic=dynamic)
        for number in range(2):
            assert torch.equal(compiled(batch(number)), steps[1](batch(number)))
            pair.compare_parameters(REDUCED_TWICE)


@case("breaks")
def in_the_root() -> None:
    class Root(Decoder):
        def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.embedding(tokens))
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return x

    pair = pair_of(Root)
    with gathered_by_hooks() as hooked:
        pair.train(pair.compiled(fullgraph=False), within=REDUCED_TWICE)
    assert not [title for title in hooked if title.startswith("blocks")], hooked


@case("breaks", is_long=True)
def where_parameters_are_read() -> None:
    shapes: list[tuple[int, ...]] = []

    class Reads(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, weight = self.n(x), self.a.weight
            shapes.append(tuple(weight.shape))
            x = x * float(weight.detach().abs().max() > 0)
            torch._dynamo.graph_break()
            first, *_ = list(self.parameters())
            x = x * (1 + 0 * first.sum())
            return x + self.b(torch.relu(F.linear(x, self.a.weight, self.a.bias)))

    pair = pair_of(with_blocks(Reads))
    pair.train(pair.compiled(fullgraph=False), within=REDUCED_TWICE)
    assert set(shapes) == {(2 * WIDTH, WIDTH)}


@torch.compiler.disable
def _disabled(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)


class _Helped(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(_disabled(self.a, self.n(x))))


class _Disabled(Block):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


trains("breaks", "by_disabled_code_in_blocks", with_blocks(_Helped), in_parts, within=REDUCED_TWICE)
trains("breaks", "by_disabled_blocks", with_blocks(_Disabled), in_parts, within=REDUCED_TWICE)


@case("breaks")
def by_an_exception() -> None:
    class Raises(Decoder):
        raises = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            made = super().forward(tokens)
            if self.raises:
                raise ValueError("expected")
            return made

    pair = pair_of(Raises)
    compiled = pair.compiled(fullgraph=False)
    pair.train(compiled, steps=1)
    pair.model.raises = True
    for ours in (compiled, pair.model):
        with pytest.raises(ValueError, match="expected"):
            ours(batch(0))
    pair.model.raises = False
    pair.train(compiled, steps=1)
    pair.train(pair.model, steps=1)


# Activation checkpointing.


class _Checkpointed(Decoder):
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = ck.checkpoint(block, x, use_reentrant=False)
        return x


def _wrapped(model: Any) -> None:
    for i in range(2):
        model.blocks[i] = checkpoint_wrapper(model.blocks[i])


class _CheckpointedBreaking(_Checkpointed):
    block = _BreakingBlock


trains("checkpointing", "in_a_compiled_model", _Checkpointed)
trains("checkpointing", "in_an_uncompiled_model", _Checkpointed, uncompiled)
trains("checkpointing", "by_wrappers", prepare=_wrapped, is_long=True)
trains("checkpointing", "of_blocks_with_breaks", _CheckpointedBreaking, in_parts, within=REDUCED_TWICE)


@case("checkpointing", is_long=True)
def of_compiled_blocks() -> None:
    pair = pair_of(_Checkpointed)
    for block in pair.model.blocks:
        compile_in_place(block, fullgraph=True)
    pair.train(pair.model)


# Checkpointing by hooks of modules.


def _composable(model: Any) -> None:
    for block in model.blocks:
        composable_checkpoint(block)


def _applied(model: Any) -> None:
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))


@case("module_checkpointing")
def composable() -> None:
    for block in (Block, _BreakingBlock):
        pair = pair_of(with_blocks(block), _composable)
        # Torch repeats such a forward outside of compiled code, also without FSDP.
        with pytest.raises(ck.CheckpointError):
            pair.backward(pair.compiled(fullgraph=False))
        pair.zero_grad()
    pair = pair_of(prepare=_composable)
    with torch.no_grad():
        pair.compiled(fullgraph=False)(batch(0))
    pair.train(pair.model)


trains("module_checkpointing", "applied", prepare=_applied, is_long=True)
trains(
    "module_checkpointing",
    "wrapped_with_breaks",
    _Breaking,
    in_parts,
    prepare=_wrapped,
    within=REDUCED_TWICE,
    is_long=True,
)
