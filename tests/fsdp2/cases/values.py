"""`unshard()` and `reshard()` by the user, other values by `functional_call`, and a Llama of transformers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile.errors import UnsupportedModelError
from fsdp_compile.fsdp2.take_over import model_of
from fsdp_compile.ir.graph import Phase, Role, StepGraph, require, role_of
from tests.fsdp2.decoder import (
    Block,
    Decoder,
    Deep,
    batch,
    case,
    compiled_graphs,
    cross_entropy,
    gathered_by_hooks,
    in_parts,
    pair_of,
    through_a_function,
    trained,
    trains,
    uncompiled,
    with_blocks,
)
from tests.models import llama
from tests.two_sides import MIXED, REDUCED_TWICE, WithFsdp2, compile_in_place


def units_gathered(step: StepGraph) -> set[str]:
    return {unit for node in step.nodes(Role.GATHER) for unit, _ in require(node).claims}


# unshard() and reshard() by the user.


@case("unshard")
def before_a_compiled_forward() -> None:
    pair = trained()
    with compiled_graphs(Phase.FORWARD) as graphs:
        for _ in (1, 2):
            for each in pair:
                each.unshard(async_op=True)
                each.blocks[0].unshard()
            pair.train(steps=1)
    assert len(graphs) == 1, len(graphs)
    taken = [require(n) for n in graphs[0].graph.find_nodes(op="placeholder") if role_of(n) is Role.UNSHARDED_PARAM]
    assert {record.unit for record in taken} == {"(root)", "blocks.0"}, taken
    assert units_gathered(graphs[0]) == {"blocks.1", "embedding", "head"}
    units = model_of(pair.model)
    assert units is not None
    assert not any(group.gathered for group in units.groups)
    with compiled_graphs(Phase.FORWARD) as graphs:
        pair.train(steps=1)
        pair.train(pair.model, steps=1)
    assert not graphs


def _gathers_before_backward(call: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(call, tokens)
    call.blocks[0].unshard()
    call.blocks[1].unshard(async_op=True)
    return loss


@case("unshard")
def between_a_forward_and_its_backward() -> None:
    """The backward frees them: the next forward reads what the optimizer has made of the shards."""
    pair = trained()
    pair.train(steps=2, loss=_gathers_before_backward)
    pair.train(pair.call, pair.call, steps=2, loss=_gathers_before_backward)


def _evaluates_before_backward(call: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(call, tokens)
    with torch.no_grad():
        getattr(call, "_orig_mod", call)(tokens)
    return loss


@case("unshard")
def by_an_uncompiled_evaluation_before_a_backward() -> None:
    """FSDP2 keeps the root gathered after a forward, and the backward frees it."""
    trained().train(steps=2, loss=_evaluates_before_backward)


def _calls_compiled_before_backward(call: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = cross_entropy(getattr(call, "_orig_mod", call), tokens)
    call.blocks[0].unshard()
    return loss + cross_entropy(call, tokens).detach()


@case("unshard")
def between_an_uncompiled_forward_and_its_backward() -> None:
    """A compiled forward takes what was gathered; the gradients of the uncompiled one are of FSDP2's objects."""
    trained().train(steps=2, loss=_calls_compiled_before_backward)


@case("unshard")
def of_a_unit_that_the_forward_leaves_out() -> None:
    """It is freed by the next backward, or by `reshard()`, as well."""
    pair = trained(Deep)
    for each, call in pair.called():
        each.left_out = {1}
        each.blocks[1].unshard()
        with torch.no_grad():
            call(batch(0))
            each.blocks[1].reshard()
            each.blocks[1].a.bias.add_(1)
        each.left_out = set()
    pair.train(steps=1)
    for left_out in ({1}, set()):
        for each in pair:
            each.left_out = left_out
            each.blocks[1].unshard()
            each.blocks[2].unshard()
        pair.train(steps=1)
    pair.train(steps=1)


@case("unshard")
def of_a_unit_of_hooks_that_the_forward_leaves_out() -> None:
    """The backward frees it, in which only graphs run."""
    pair = pair_of(Deep)
    pair.compiled()
    for each, call in pair.called():
        each.blocks[1].set_all_reduce_hook(id)
        each.left_out = {1}
        _gathers_before_backward(call, batch(0)).backward()
        with torch.no_grad():
            each.blocks[1].a.bias.add_(1)
        each.left_out = set()
    pair.train(pair.model, steps=1)


@case("unshard", is_long=True)
def before_the_first_forward() -> None:
    pair = pair_of()
    pair.compiled()
    for _ in range(3):
        for each in pair:
            each.unshard(async_op=True)
            each.blocks[0].unshard(async_op=True)
        pair.train(steps=1)


@case("unshard", is_long=True)
def before_an_evaluation() -> None:
    pair = trained()
    for _ in range(2):
        pair.change(lambda model: model.unshard())
        with torch.no_grad():
            assert torch.equal(pair.call(batch(9)), pair.reference(batch(9)))
    pair.reference.reshard()
    pair.train(steps=1)


@case("unshard")
def and_reshard() -> None:
    pair = trained()
    for each in pair:
        each.unshard()
        each.blocks[1].unshard()
        each.reshard()
        each.blocks[1].reshard()
    assert all(isinstance(p, DTensor) for p in pair.model.parameters())
    pair.train(steps=1)
    pair.change(lambda model: model.unshard())
    pair.train(pair.model, steps=1)


@case("unshard", is_long=True)
def before_a_compiled_function() -> None:
    pair = pair_of()
    model = pair.model
    _, loss = through_a_function(pair)

    pair.train(model, steps=1, loss=loss)
    pair.change(lambda model: model.unshard())
    pair.train(model, steps=1, loss=loss)
    pair.train(model, steps=1)


# functional_call.


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach() * 0.5 for name, p in model.named_parameters()}


@case("functional_call")
def around_a_forward() -> None:
    pair = pair_of()
    compiled, plain = pair.compiled(), Decoder()
    pair.train(compiled, steps=1)
    values = {name: value.requires_grad_() for name, value in _values(pair.model).items()}
    expected = torch.func.functional_call(plain, values, (batch(1),))
    wanted = torch.autograd.grad(expected.square().sum(), list(values.values()))
    some = {name: values[name] for name in ("blocks.0.a.weight", "norm.weight")}
    rest = {name: p.full_tensor().detach() for name, p in pair.model.named_parameters() if name not in some}
    partly = torch.func.functional_call(plain, {**rest, **some}, (batch(1),))
    for model, prefix in ((pair.model, ""), (compiled, "_orig_mod.")):
        made = torch.func.functional_call(model, {prefix + n: v for n, v in values.items()}, (batch(1),))
        assert torch.equal(made, expected)
        found = torch.autograd.grad(made.square().sum(), list(values.values()))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        made = torch.func.functional_call(model, {prefix + n: v for n, v in some.items()}, (batch(1),))
        assert torch.equal(made, partly)
        if not prefix:
            pair.train(compiled, steps=1)
        pair.model.reshard()  # FSDP2 leaves the root gathered
        rest = {name: p.full_tensor().detach() for name, p in pair.model.named_parameters() if name not in some}
        partly = torch.func.functional_call(plain, {**rest, **some}, (batch(1),))
    pair.train(pair.model, steps=1)
    pair.train(compiled, steps=1)


@case("functional_call")
def around_compiled_blocks() -> None:
    for options in ({"regions": "blocks"}, None):
        pair, plain = pair_of(), Decoder()
        if options:
            pair.compiled(fullgraph=False, **options)
        else:
            for block in pair.model.blocks:
                compile_in_place(block)
        pair.train(steps=1)
        for of in ("", "blocks.1.", "head."):
            pair.model.reshard()  # FSDP2 leaves the root gathered
            full = {name: p.full_tensor().detach() for name, p in pair.model.named_parameters()}
            given = {name: value * 0.5 for name, value in full.items() if name.startswith(of)}
            expected = torch.func.functional_call(plain, {**full, **given}, (batch(1),))
            assert torch.equal(torch.func.functional_call(pair.model, given, (batch(1),)), expected)
        pair.train(steps=1)


@case("functional_call")
def of_sharded_values() -> None:
    pair = trained()
    sharded = {f"_orig_mod.{name}": p.detach() * 2 for name, p in pair.model.named_parameters()}
    with pytest.raises(UnsupportedModelError, match=r"full_tensor\(\)"):
        torch.func.functional_call(pair.call, sharded, (batch(0),))


class _Halved(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = {f"0.{name}": p / 2 for name, p in self.a.named_parameters()}
        half = torch.func.functional_call(nn.Sequential(self.a), halves, (self.n(x),))
        return x + self.b(torch.relu(half))


class _Maml(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values: dict[str, torch.Tensor] = dict(self.b.named_parameters())
        hidden = torch.relu(self.a(self.n(x)))

        def inner(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(self.b, values, (hidden.detach(),)).square().mean()

        grads = torch.func.grad(inner)(values)
        moved = {name: value - 0.1 * grads[name] for name, value in values.items()}
        return x + torch.func.functional_call(self.b, moved, (hidden,))


def _freeze_block(model: Any) -> None:
    model.blocks[1].requires_grad_(requires_grad=False)


for _made in (_Halved, _Maml):
    trains("functional_call", f"uncompiled{_made.__name__}", with_blocks(_made), uncompiled, steps=1, is_long=True)
    trains("functional_call", f"in{_made.__name__}", with_blocks(_made), in_parts, within=REDUCED_TWICE, is_long=True)
trains(
    "functional_call",
    "in_a_frozen_block",
    with_blocks(_Maml),
    in_parts,
    prepare=_freeze_block,
    within=REDUCED_TWICE,
    is_long=True,
)


@case("functional_call")
def in_one_graph() -> None:
    pair = pair_of(with_blocks(_Halved))
    with pytest.raises(BackendCompilerFailed, match="functional_call") as caught:
        pair.compiled()(batch(0))
    assert isinstance(caught.value.inner_exception, UnsupportedModelError)


# A Llama of transformers: training, recorded hidden states, and `generate()`.


def _shard(model: Any, **settings: Any) -> None:
    model.tie_weights()
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)


def _loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@case("llama")
def trains_in_one_graph() -> None:
    for ties in (False, True):
        pair = pair_of(functools.partial(llama.model, tie_word_embeddings=ties), sharded=_shard)
        with gathered_by_hooks() as hooked:
            # Eager code computes attention's gradients in another order than AOTAutograd's graphs.
            pair.train(pair.compiled(), other=torch.compile(pair.reference, backend="aot_eager"), loss=_loss)
        assert not hooked, hooked


@case("llama", is_long=True)
def trains_in_mixed_precision() -> None:
    pair = pair_of(llama.model, sharded=_shard, mp_policy=MIXED)
    pair.train(pair.compiled(), other=torch.compile(pair.reference, backend="aot_eager"), loss=_loss)


@case("llama", is_long=True)
def layers_one_by_one() -> None:
    for settings in ({}, {"mp_policy": MIXED}):

        def looped(model: Any, settings: dict[str, Any] = settings) -> None:
            _shard(model, **settings)
            for layer in model.model.layers:
                compile_in_place(layer, reduce_layout="fsdp2")

        make = functools.partial(llama.model, attn_implementation="eager")
        pair = WithFsdp2(make, functools.partial(_shard, **settings), batch, _loss, ours=looped)
        with gathered_by_hooks() as titles:
            pair.train(steps=3)
        assert not [title for title in titles[3:] if "layers" in title]


@case("llama", is_long=True)
def records_hidden_states() -> None:
    pair = pair_of(llama.model, sharded=_shard)
    tokens = torch.arange(24).view(2, 12)
    for in_place in (False, True):
        if in_place:
            compile_in_place(pair.model)
        ours = pair.model if in_place else pair.compiled(fullgraph=False)
        for _ in range(2):
            with torch.no_grad():
                made, wanted = (each(input_ids=tokens, output_hidden_states=True) for each in (ours, pair.reference))
            assert len(made.hidden_states) == len(wanted.hidden_states) == 3
            for a, b in zip(made.hidden_states, wanted.hidden_states, strict=True):
                assert torch.equal(a, b)


@case("llama", is_long=True)
def generates_different_lengths() -> None:
    make = functools.partial(llama.model, pad_token_id=0, eos_token_id=None)
    pair = pair_of(make, sharded=_shard)
    torch.manual_seed(0)
    plain = make()
    pair.train(pair.compiled(), loss=_loss, steps=1, within=REDUCED_TWICE)
    plain.load_state_dict({name: p.full_tensor() for name, p in pair.model.state_dict().items()})
    prompt = torch.arange(3, 7 if dist.get_rank() == 0 else 13)[None]
    made = pair.model.generate(prompt, max_length=16, do_sample=False)
    assert torch.equal(made, plain.generate(prompt, max_length=16, do_sample=False))
