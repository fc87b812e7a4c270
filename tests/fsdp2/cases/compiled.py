"""How a model is compiled, settings of FSDP2, and state that is saved, loaded, converted, frozen or written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import UnsupportedModelError
from tests.fsdp2.decoder import (
    WIDTH,
    Decoder,
    Tied,
    batch,
    case,
    cross_entropy,
    gathered_by_hooks,
    pair_of,
    through_a_function,
    trained,
    trains,
    uncompiled,
    whole,
)
from tests.two_sides import MIXED, REDUCED_TWICE, compile_eagerly, compile_in_place, local, sgd

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
    pair.compiled()
    for _ in range(2):
        pair.train(steps=1)
        pair.change(lambda model: model.eval())
        for ours in (pair.call, pair.model):
            with torch.no_grad():
                assert torch.equal(ours(batch(9)), pair.reference(batch(9)))
            with torch.inference_mode():
                assert torch.equal(ours(batch(9)), pair.reference(batch(9)))
        pair.change(lambda model: model.train())


@case("compiled", is_long=True)
def beyond_the_recompile_limit() -> None:
    pair = pair_of()
    pair.compiled(fullgraph=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        pair.train(steps=1)
        for length in (3, 4, 6):
            with torch.no_grad():
                assert torch.equal(pair.call(batch(0, (1, length))), pair.reference(batch(0, (1, length))))
    pair.train(steps=1, within=REDUCED_TWICE)


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
    pair = trained()
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=False)
        each.blocks[1].a.weight.requires_grad_(requires_grad=False)
    pair.train(steps=1)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=True)
    pair.train(steps=1)
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


# State.


@case("state")
def loaded_between_steps() -> None:
    pair = trained()
    saved = {key: value.clone() for key, value in pair.model.state_dict().items()}
    pair.train(steps=1)
    pair.change(lambda model: model.load_state_dict(saved))
    pair.train(steps=1)
    pair.change(lambda model: model.load_state_dict({key: value.clone() for key, value in saved.items()}, assign=True))
    pair.optimizers.clear()
    pair.train()
    for each in pair:
        for parameter in each.parameters():
            parameter.data = parameter.data * 0.9
    pair.train(steps=1)
    pair.train(pair.model, steps=1)


class _Reads(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + torch.stack([p.sum() for p in self.norm.parameters()]).sum()


trains("state", "read_in_a_forward", _Reads)


# Parameters that are converted, swapped and frozen.


@case("changes")
def swapped_tensors() -> None:
    pair = trained()
    for each in pair:
        parameter = each.blocks[0].a.weight
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))
        each.load_state_dict(each.state_dict())
    if dist.get_rank() >= 0:
        for ours in (pair.call, pair.model):
            pair.zero_grad()
            cross_entropy(ours, batch(1)).backward()
            assert pair.model.blocks[0].a.weight.grad is not None


@case("changes")
def before_a_compiled_function_again() -> None:
    pair = pair_of()
    model = pair.model
    step, loss = through_a_function(pair)

    pair.train(model, steps=1, loss=loss)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=False)
    pair.train(model, steps=1, loss=loss)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=True)
    with pytest.raises(UnsupportedModelError, match="frozen are trained now, and a compiled function"):
        step(batch(2))
    pair.train(model, loss=loss)


# Gradients that accumulate, that are chosen, clipped or changed by hooks.


@case("gradients")
def accumulated() -> None:
    for order, within in (("ccc", None), ("eee", None), ("cec", None), ("ece", REDUCED_TWICE), ("cce", None)):
        pair = pair_of()
        compiled = pair.compiled()
        pair.optimize(sgd)
        pair.train(*(compiled if how == "c" else pair.model for how in order), within=within)


@case("gradients")
def unused_parameters() -> None:
    class Unused(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].unused = nn.Parameter(torch.ones(4))
            self.unused = nn.Linear(WIDTH, WIDTH)

    pair = pair_of(Unused)
    pair.compiled()
    pair.train()
    pair.backward()
    pair.compare_gradients()
    assert pair.model.unused.weight.grad is None
    pair.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = cross_entropy(pair.call, batch(0))
    loss.backward()
    cross_entropy(pair.reference, batch(0)).backward()
    pair.compare_gradients()


@case("gradients")
def hooks_of_parameters() -> None:
    pair = pair_of()
    compiled, calls = pair.compiled(), []
    named = dict(pair.model.named_parameters())
    named["head.weight"].register_hook(lambda grad: grad * 2)
    named["blocks.1.a.weight"].register_hook(lambda grad: calls.append(("grad", local(grad).clone())))
    named["blocks.0.a.weight"].register_post_accumulate_grad_hook(
        lambda p: calls.append(("post", local(p.grad).clone()))
    )
    several = [named["norm.weight"], named["blocks.0.b.bias"]]
    torch.autograd.graph.register_multi_grad_hook(several, lambda grads: calls.append(("multi", len(grads))))
    pair.backward(compiled)
    theirs = dict(pair.reference.named_parameters())
    assert torch.equal(local(named["head.weight"].grad), 2 * local(theirs["head.weight"].grad))
    found = dict(calls)
    assert len(calls) == 3, calls
    assert torch.equal(found["grad"], local(theirs["blocks.1.a.weight"].grad))
    assert torch.equal(found["post"], local(theirs["blocks.0.a.weight"].grad))


@case("gradients", is_long=True)
def optimizer_in_hooks() -> None:
    pair = pair_of()
    pair.compiled()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in pair.model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    other = torch.optim.SGD(pair.reference.parameters(), 0.1)
    for _ in range(2):
        pair.backward()
        other.step()
        other.zero_grad()
    pair.compare_parameters()


@case("gradients")
def of_several_forwards() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    for second in (compiled, pair.model):
        pair.zero_grad()
        (cross_entropy(compiled, batch(0)) + cross_entropy(second, batch(1))).backward()
        (cross_entropy(pair.reference, batch(0)) + cross_entropy(pair.reference, batch(1))).backward()
        pair.compare_gradients(within=REDUCED_TWICE)


@case("gradients", is_long=True)
def of_a_penalty_on_parameters() -> None:
    def penalty(model: nn.Module) -> torch.Tensor:
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        return torch.stack([p.square().sum() for p in full]).sum()

    pair = pair_of()
    compiled = pair.compiled()
    for ours, model in ((compiled, pair.model), (pair.reference, pair.reference)):
        (cross_entropy(ours, batch(0)) + 1e-2 * penalty(model)).backward()
    pair.compare_gradients(within=REDUCED_TWICE)
