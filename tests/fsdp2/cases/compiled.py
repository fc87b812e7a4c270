"""How a model is compiled, and the settings of FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp2.decoder import WIDTH, Tied, batch, case, gathered_by_hooks, pair_of, through_a_function
from tests.two_sides import REDUCED_TWICE, compile_eagerly, compile_in_place

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# How a model is compiled.


@case("compiled")
def whole_model() -> None:
    pair = pair_of()
    with gathered_by_hooks() as hooked:
        pair.train(pair.compiled(), steps=3)
    assert not hooked, hooked


@case("compiled")
def in_place() -> None:
    pair = pair_of()
    compile_in_place(pair.model, fullgraph=True)
    with gathered_by_hooks() as hooked:
        pair.train(pair.model)
    assert not hooked, hooked


@case("compiled")
def function_of_a_model() -> None:
    pair = pair_of()
    pair.train(pair.model, loss=through_a_function(pair)[1])


@case("compiled", is_long=True)
def function_with_a_break() -> None:
    def plain(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        made = model(tokens)
        torch._dynamo.graph_break()
        return F.cross_entropy(made.flatten(0, 1), tokens.flatten())

    pair = pair_of()
    compiled = compile_eagerly(plain)
    pair.train(pair.model, loss=lambda model, i: (compiled if model is pair.model else plain)(model, i))


@case("compiled")
def blocks_one_by_one() -> None:
    pair = pair_of()
    for block in pair.model.blocks:
        compile_in_place(block, fullgraph=True)
    with gathered_by_hooks() as hooked:
        pair.train(pair.model, steps=3)
    assert not [title for title in hooked if title.startswith("blocks")], hooked


@case("compiled", is_long=True)
def block_of_a_model() -> None:
    pair = pair_of()
    compiled, block = pair.compiled(), compile_eagerly(pair.model.blocks[0])
    pair.train(compiled)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for ours in (block, pair.model.blocks[0]):
        pair.zero_grad()
        ours(x).sum().backward()
        pair.reference.blocks[0](x).sum().backward()
        pair.compare_gradients()


@case("compiled", is_long=True)
def uncompiled() -> None:
    pair = pair_of()
    pair.train(pair.model)


@case("compiled")
def alternately() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    for step in range(4):
        ours = pair.model if step % 2 else compiled
        pair.train(ours, steps=1)


@case("compiled", is_long=True)
def evaluated_between() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    for _ in range(2):
        pair.train(compiled, steps=1)
        for each in pair:
            each.eval()
        for ours in (compiled, pair.model):
            with torch.no_grad():
                assert torch.equal(ours(batch(9)), pair.reference(batch(9)))
            with torch.inference_mode():
                assert torch.equal(ours(batch(9)), pair.reference(batch(9)))
        for each in pair:
            each.train()


@case("compiled", is_long=True)
def beyond_the_recompile_limit() -> None:
    pair = pair_of()
    compiled = pair.compiled(fullgraph=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        pair.train(compiled, steps=1)
        for length in (3, 4, 6):
            with torch.no_grad():
                assert torch.equal(compiled(batch(0, (1, length))), pair.reference(batch(0, (1, length))))
    pair.train(compiled, steps=1, within=REDUCED_TWICE)


# Settings of FSDP2.


@case("settings", is_long=True)
def mixed_precision() -> None:
    pair = pair_of(mp_policy=BF16)
    pair.train(pair.compiled(), other=torch.compile(pair.reference, backend="aot_eager"))


@case("settings")
def mixed_precision_alternately() -> None:
    pair = pair_of(mp_policy=BF16)
    compiled = pair.compiled()
    for step in range(3):
        ours = compiled if step % 2 else pair.model
        pair.train(ours, steps=1)


@case("settings", is_long=True)
def parameters_kept_until_backward() -> None:
    pair = pair_of(reshard_after_forward=False)
    pair.train(pair.compiled())


@case("settings")
def tied_parameters() -> None:
    for compiles in (True, False):
        pair = pair_of(Tied)
        assert len(list(pair.model.parameters())) == len(list(pair.reference.parameters()))
        pair.train(pair.compiled() if compiles else pair.model)


@case("settings", is_long=True)
def frozen_parameters() -> None:
    def freeze(model: Any) -> None:
        model.embedding.weight.requires_grad_(requires_grad=False)
        model.blocks[0].a.weight.requires_grad_(requires_grad=False)
        model.blocks[1].requires_grad_(requires_grad=False)

    pair = pair_of(prepare=freeze)
    pair.train(pair.compiled())


@case("settings")
def frozen_and_thawed() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    pair.train(compiled, steps=1)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=False)
        each.blocks[1].a.weight.requires_grad_(requires_grad=False)
    pair.train(compiled, steps=1)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=True)
    pair.train(compiled, steps=1)
    pair.train(pair.model, steps=1)


@case("settings")
def frozen_for_a_microbatch() -> None:
    """What waits of a unit that is frozen now is reduced when FSDP2 reduces it, not in the next backward."""
    options: Any
    for frozen_in, options in ((1, {"fullgraph": False, "regions": "blocks"}), (2, {})):

        def before(model: Any, number: int, frozen_in: int = frozen_in) -> None:
            model.set_requires_gradient_sync(number == 2)
            model.blocks[0].requires_grad_(number != frozen_in)

        pair = pair_of()
        pair.train(*[pair.compiled(**options)] * 3, before=before)
