"""How a model is compiled, and the settings of FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.fsdp2.decoder import (
    WIDTH,
    Decoder,
    Tied,
    batch,
    case,
    gathered_by_hooks,
    pair_of,
    through_a_function,
    trains,
    uncompiled,
    whole,
)
from tests.two_sides import MIXED, REDUCED_TWICE, compile_eagerly, compile_in_place

# How a model is compiled.


@case("compiled")
def whole_model_and_in_place() -> None:
    for in_place in (False, True):
        pair = pair_of()
        call = compile_in_place(pair.model, fullgraph=True) if in_place else pair.compiled()
        with gathered_by_hooks() as hooked:
            pair.train(call, steps=3)
        assert not hooked, hooked


trains("compiled", "uncompiled", Decoder, uncompiled, is_long=True)
trains("compiled", "alternately", Decoder, whole, uncompiled, whole, uncompiled, steps=1)


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
def evaluated_between() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    for _ in range(2):
        pair.train(compiled, steps=1)
        pair.change(lambda model: model.eval())
        for ours in (compiled, pair.model):
            with torch.no_grad():
                assert torch.equal(ours(batch(9)), pair.reference(batch(9)))
            with torch.inference_mode():
                assert torch.equal(ours(batch(9)), pair.reference(batch(9)))
        pair.change(lambda model: model.train())


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


def _freeze(model: Any) -> None:
    model.embedding.weight.requires_grad_(requires_grad=False)
    model.blocks[0].a.weight.requires_grad_(requires_grad=False)
    model.blocks[1].requires_grad_(requires_grad=False)


trains("settings", "mixed_precision_alternately", Decoder, uncompiled, whole, uncompiled, steps=1, mp_policy=MIXED)
trains("settings", "parameters_kept_until_backward", reshard_after_forward=False, is_long=True)
trains("settings", "tied_parameters", Tied)
trains("settings", "tied_parameters_uncompiled", Tied, uncompiled)
trains("settings", "frozen_parameters", prepare=_freeze, is_long=True)


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
