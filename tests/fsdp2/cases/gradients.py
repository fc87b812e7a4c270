"""Gradients that accumulate, that are chosen, clipped or changed by hooks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.fsdp2.decoder import WIDTH, Decoder, batch, case, cross_entropy, pair_of
from tests.two_sides import REDUCED_TWICE, local, sgd


@case("gradients")
def accumulated() -> None:
    """Compiled and in eager code."""
    for order, within in (("ccc", None), ("eee", None), ("cec", None), ("ece", REDUCED_TWICE), ("cce", None)):
        pair = pair_of()
        compiled = pair.compiled()
        pair.optimize(sgd)
        pair.train(*(compiled if how == "c" else pair.model for how in order), within=within)


@case("gradients")
def reduced_in_each_microbatch() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    for _ in range(3):
        pair.backward(compiled)
    pair.compare_gradients()


@case("gradients")
def clipped() -> None:
    pair = pair_of()
    compiled = pair.compiled()
    pair.optimize()
    for _ in range(2):
        pair.backward(compiled)
        a, b = (nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in pair)
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        assert torch.equal(a.full_tensor(), b.full_tensor())
        pair.compare_gradients()
        pair.update()
    pair.compare_parameters()


@case("gradients")
def unused_parameters() -> None:
    class Unused(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].unused = nn.Parameter(torch.ones(4))
            self.unused = nn.Linear(WIDTH, WIDTH)

    pair = pair_of(Unused)
    compiled = pair.compiled()
    pair.train(compiled)
    pair.backward(compiled)
    pair.compare_gradients()
    assert pair.model.unused.weight.grad is None
    pair.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = cross_entropy(compiled, batch(0))
    loss.backward()
    cross_entropy(pair.reference, batch(0)).backward()
    pair.compare_gradients()


@case("gradients", is_long=True)
def of_chosen_parameters() -> None:
    pair = pair_of()
    compiled, parameters = pair.compiled(), list(pair.model.parameters())
    every = torch.autograd.grad(cross_entropy(compiled, batch(0)), parameters)
    assert all(p.grad is None for p in parameters)
    some = torch.autograd.grad(cross_entropy(compiled, batch(0)), [parameters[3], parameters[0]])
    assert torch.equal(local(some[0]), local(every[3]))
    assert torch.equal(local(some[1]), local(every[0]))
    cross_entropy(compiled, batch(0)).backward(inputs=[parameters[3]])
    assert [i for i, p in enumerate(parameters) if p.grad is not None] == [3]
    assert torch.equal(local(parameters[3].grad), local(every[3]))
    pair.zero_grad()
    pair.train(compiled)


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
    compiled = pair.compiled()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in pair.model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    other = torch.optim.SGD(pair.reference.parameters(), 0.1)
    for _ in range(2):
        pair.backward(compiled)
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


@case("gradients", is_long=True)
def of_a_graph_that_is_kept() -> None:
    pair = pair_of()
    for model in (pair.compiled(), pair.reference):
        loss = cross_entropy(model, batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
    pair.compare_gradients()
