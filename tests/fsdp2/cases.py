"""Programs that a model under torch's FSDP2 runs: each compares its compiled form with FSDP2's eager code.

Where a unit is read by two graphs, or by a graph and by hooks, its gradients are reduced once for each: they are equal
to 1e-4 there, and to the bit elsewhere.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import torch.utils.checkpoint as ck
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile.backend import fsdp
from tests.fsdp2.pair import (
    OPTIONS,
    WIDTH,
    Block,
    Case,
    Decoder,
    Pair,
    Tied,
    adamw,
    batch,
    cross_entropy,
    gathered_by_hooks,
    local,
)

GROUPS: dict[str, dict[str, Case]] = {}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def case(group: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        GROUPS.setdefault(group, {})[function.__name__] = function
        return function

    return add


# How a model is compiled.


@case("compiled")
def whole_model() -> None:
    pair = Pair.of()
    with gathered_by_hooks() as hooked:
        pair.train(pair.compiled(), steps=3)
    assert not hooked, hooked


@case("compiled")
def in_place() -> None:
    pair = Pair.of()
    pair.model.compile(backend=fsdp, options=OPTIONS, fullgraph=True)
    with gathered_by_hooks() as hooked:
        pair.train(pair.model)
    assert not hooked, hooked


@case("compiled")
def function_of_a_model() -> None:
    pair = Pair.of()
    model = pair.model
    step = torch.compile(lambda i: cross_entropy(model, i), backend=fsdp, options=OPTIONS, fullgraph=True)
    pair.train(model, loss=lambda each, i: step(i) if each is model else cross_entropy(each, i))


@case("compiled")
def function_with_a_break() -> None:
    def plain(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        made = model(tokens)
        torch._dynamo.graph_break()
        return F.cross_entropy(made.flatten(0, 1), tokens.flatten())

    pair = Pair.of()
    compiled = torch.compile(plain, backend=fsdp, options=OPTIONS)
    pair.train(pair.model, loss=lambda model, i: (compiled if model is pair.model else plain)(model, i))


@case("compiled")
def blocks_one_by_one() -> None:
    pair = Pair.of()
    for block in pair.model.blocks:
        block.compile(backend=fsdp, options=OPTIONS, fullgraph=True)
    with gathered_by_hooks() as hooked:
        pair.train(pair.model, steps=3)
    assert not [title for title in hooked if title.startswith("blocks")], hooked


@case("compiled")
def block_of_a_model() -> None:
    pair = Pair.of()
    compiled, block = pair.compiled(), torch.compile(pair.model.blocks[0], backend=fsdp, options=OPTIONS)
    pair.train(compiled)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for ours in (block, pair.model.blocks[0]):
        pair.zero_grad()
        ours(x).sum().backward()
        pair.reference.blocks[0](x).sum().backward()
        pair.compare_grads()


@case("compiled")
def uncompiled() -> None:
    pair = Pair.of()
    pair.train(pair.model)


@case("compiled")
def alternately() -> None:
    pair, optimizers = Pair.of(), None
    compiled = pair.compiled()
    for step in range(4):
        ours = pair.model if step % 2 else compiled
        optimizers = pair.train(ours, steps=1, start=step, optimizers=optimizers)


@case("compiled")
def evaluated_between() -> None:
    pair, optimizers = Pair.of(), None
    compiled = pair.compiled()
    for step in range(2):
        optimizers = pair.train(compiled, steps=1, start=step, optimizers=optimizers)
        for each in pair:
            each.eval()
        for ours in (compiled, pair.model):
            with torch.no_grad():
                assert torch.equal(ours(batch(9)), pair.reference(batch(9)))
            with torch.inference_mode():
                assert torch.equal(ours(batch(9)), pair.reference(batch(9)))
        for each in pair:
            each.train()


@case("compiled")
def beyond_the_recompile_limit() -> None:
    pair = Pair.of()
    compiled = pair.compiled(fullgraph=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        optimizers = pair.train(compiled, steps=1)
        for length in (3, 4, 6):
            with torch.no_grad():
                assert torch.equal(compiled(batch(0, (1, length))), pair.reference(batch(0, (1, length))))
    pair.train(compiled, steps=1, start=1, optimizers=optimizers, exact=False)


# Settings of FSDP2.


@case("settings")
def mixed_precision() -> None:
    pair = Pair.of(mp_policy=BF16)
    pair.train(pair.compiled(), torch.compile(pair.reference, backend="aot_eager"))


@case("settings")
def mixed_precision_alternately() -> None:
    pair, optimizers = Pair.of(mp_policy=BF16), None
    compiled = pair.compiled()
    for step in range(3):
        ours = compiled if step % 2 else pair.model
        optimizers = pair.train(ours, steps=1, start=step, optimizers=optimizers)


@case("settings")
def parameters_kept_until_backward() -> None:
    pair = Pair.of(reshard_after_forward=False)
    pair.train(pair.compiled())


@case("settings")
def tied_parameters() -> None:
    for compiles in (True, False):
        pair = Pair.of(Tied)
        assert len(list(pair.model.parameters())) == len(list(pair.reference.parameters()))
        pair.train(pair.compiled() if compiles else pair.model)


@case("settings")
def frozen_parameters() -> None:
    def freeze(model: Any) -> None:
        model.embedding.weight.requires_grad_(requires_grad=False)
        model.blocks[0].a.weight.requires_grad_(requires_grad=False)
        model.blocks[1].requires_grad_(requires_grad=False)

    pair = Pair.of(prepare=freeze)
    pair.train(pair.compiled())


@case("settings")
def frozen_and_thawed() -> None:
    pair = Pair.of()
    compiled = pair.compiled()
    optimizers = pair.train(compiled, steps=1)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=False)
        each.blocks[1].a.weight.requires_grad_(requires_grad=False)
    pair.train(compiled, steps=1, start=1, optimizers=optimizers)
    for each in pair:
        each.blocks[0].requires_grad_(requires_grad=True)
    pair.train(compiled, steps=1, start=2, optimizers=optimizers)
    pair.train(pair.model, steps=1, start=3, optimizers=optimizers)


# Gradients.


def _accumulate(order: str, *, exact: bool = True, **settings: Any) -> None:
    pair = Pair.of(**settings)
    compiled = pair.compiled()
    for step in range(2):
        for micro, how in enumerate(order):
            is_last = micro == len(order) - 1
            for each in pair:
                each.set_requires_gradient_sync(is_last)
            pair.backward(compiled if how == "c" else pair.model, step=10 * step + micro)
            assert is_last or all(p.grad is None for p in pair.model.parameters())
        pair.compare_grads(exact=exact)
        for each in pair:
            torch.optim.SGD(each.parameters(), 0.1).step()
        pair.zero_grad()


@case("gradients")
def accumulated() -> None:
    _accumulate("ccc")
    _accumulate("eee")


@case("gradients")
def accumulated_in_both_worlds() -> None:
    _accumulate("cec")
    _accumulate("ece", exact=False)
    _accumulate("cce")


@case("gradients")
def accumulated_in_mixed_precision() -> None:
    _accumulate("ccc", mp_policy=BF16)


@case("gradients")
def reduced_in_each_microbatch() -> None:
    pair = Pair.of()
    compiled = pair.compiled()
    for step in range(3):
        pair.backward(compiled, step=step)
    pair.compare_grads()


@case("gradients")
def clipped() -> None:
    pair = Pair.of()
    compiled, optimizers = pair.compiled(), [adamw(each) for each in pair]
    for step in range(2):
        pair.backward(compiled, step=step)
        a, b = (nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in pair)
        assert isinstance(a, DTensor)
        assert isinstance(b, DTensor)
        assert torch.equal(a.full_tensor(), b.full_tensor())
        pair.compare_grads()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pair.compare_parameters()


@case("gradients")
def unused_parameters() -> None:
    class Unused(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[0].unused = nn.Parameter(torch.ones(4))
            self.unused = nn.Linear(WIDTH, WIDTH)

    pair = Pair.of(Unused)
    compiled = pair.compiled()
    pair.train(compiled)
    pair.backward(compiled)
    pair.compare_grads()
    assert pair.model.unused.weight.grad is None
    pair.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = cross_entropy(compiled, batch(0))
    loss.backward()
    cross_entropy(pair.reference, batch(0)).backward()
    pair.compare_grads()


@case("gradients")
def of_chosen_parameters() -> None:
    pair = Pair.of()
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
    pair = Pair.of()
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


@case("gradients")
def optimizer_in_hooks() -> None:
    pair = Pair.of()
    compiled = pair.compiled()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in pair.model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    other = torch.optim.SGD(pair.reference.parameters(), 0.1)
    for step in range(2):
        pair.backward(compiled, step=step)
        other.step()
        other.zero_grad()
    pair.compare_parameters()


@case("gradients")
def of_several_forwards() -> None:
    pair = Pair.of()
    compiled = pair.compiled()
    for second in (compiled, pair.model):
        pair.zero_grad()
        (cross_entropy(compiled, batch(0)) + cross_entropy(second, batch(1))).backward()
        (cross_entropy(pair.reference, batch(0)) + cross_entropy(pair.reference, batch(1))).backward()
        pair.compare_grads(exact=False)


@case("gradients")
def of_a_penalty_on_parameters() -> None:
    def penalty(model: nn.Module) -> torch.Tensor:
        full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        return torch.stack([p.square().sum() for p in full]).sum()

    pair = Pair.of()
    compiled = pair.compiled()
    for ours, model in ((compiled, pair.model), (pair.reference, pair.reference)):
        (cross_entropy(ours, batch(0)) + 1e-2 * penalty(model)).backward()
    pair.compare_grads(exact=False)


@case("gradients")
def of_a_graph_that_is_kept() -> None:
    pair = Pair.of()
    for model in (pair.compiled(), pair.reference):
        loss = cross_entropy(model, batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
    pair.compare_grads()


@case("gradients")
def with_saved_tensors_elsewhere() -> None:
    pair = Pair.of()
    with torch.autograd.graph.save_on_cpu():
        loss = cross_entropy(pair.compiled(), batch(0))
    loss.backward()
    cross_entropy(pair.reference, batch(0)).backward()
    pair.compare_grads()


# Graph breaks.


class _BreakingBlock(Block):
    breaks = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.n(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.b(torch.relu(self.a(x)))


class _Breaking(Decoder):
    block = _BreakingBlock


@case("breaks")
def in_blocks() -> None:
    pair = Pair.of(_Breaking)
    pair.train(pair.compiled(fullgraph=False), exact=False)


@case("breaks")
def in_one_block() -> None:
    def prepare(model: Any) -> None:
        model.blocks[0].breaks = False

    pair = Pair.of(_Breaking, prepare)
    pair.train(pair.compiled(fullgraph=False), exact=False)


@case("breaks")
def in_the_root() -> None:
    class Root(Decoder):
        def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.embedding(tokens))
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return x

    pair = Pair.of(Root)
    with gathered_by_hooks() as hooked:
        pair.train(pair.compiled(fullgraph=False), exact=False)
    assert not [title for title in hooked if title.startswith("blocks")], hooked


@case("breaks")
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

    class Model(Decoder):
        block = Reads

    pair = Pair.of(Model)
    pair.train(pair.compiled(fullgraph=False), exact=False)
    assert set(shapes) == {(2 * WIDTH, WIDTH)}


@case("breaks")
def by_disabled_code() -> None:
    @torch.compiler.disable
    def helper(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, linear.weight, linear.bias)

    class Helped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(torch.relu(helper(self.a, self.n(x))))

    class Disabled(Block):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    for made in (Helped, Disabled):
        model = type("Model", (Decoder,), {"block": made})
        pair = Pair.of(model)
        pair.train(pair.compiled(fullgraph=False), exact=False)


@case("breaks")
def by_an_exception() -> None:
    class Raises(Decoder):
        raises = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            made = super().forward(tokens)
            if self.raises:
                raise ValueError("expected")
            return made

    pair = Pair.of(Raises)
    compiled = pair.compiled(fullgraph=False)
    optimizers = pair.train(compiled, steps=1)
    pair.model.raises = True
    for ours in (compiled, pair.model):
        try:
            ours(batch(0))
        except ValueError:
            continue
        raise AssertionError("no error")
    pair.model.raises = False
    optimizers = pair.train(compiled, steps=1, start=1, optimizers=optimizers)
    pair.train(pair.model, steps=1, start=2, optimizers=optimizers)


# Activation checkpointing.


class _Checkpointed(Decoder):
    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = ck.checkpoint(block, x, use_reentrant=False)
        return x


@case("checkpointing")
def in_the_model() -> None:
    for compiles in (True, False):
        pair = Pair.of(_Checkpointed)
        pair.train(pair.compiled() if compiles else pair.model)


@case("checkpointing")
def by_wrappers() -> None:
    def wrap(model: Any) -> None:
        for i in range(2):
            model.blocks[i] = checkpoint_wrapper(model.blocks[i])

    pair = Pair.of(prepare=wrap)
    pair.train(pair.compiled())


@case("checkpointing")
def of_blocks_with_breaks() -> None:
    class Model(_Checkpointed):
        block = _BreakingBlock

    pair = Pair.of(Model)
    pair.train(pair.compiled(fullgraph=False), exact=False)


@case("checkpointing")
def of_compiled_blocks() -> None:
    pair = Pair.of(_Checkpointed)
    for block in pair.model.blocks:
        block.compile(backend=fsdp, options=OPTIONS, fullgraph=True)
    pair.train(pair.model)


# State.


@case("state")
def loaded_between_steps() -> None:
    pair = Pair.of()
    compiled = pair.compiled()
    optimizers = pair.train(compiled, steps=1)
    saved = {key: value.clone() for key, value in pair.model.state_dict().items()}
    optimizers = pair.train(compiled, steps=1, start=1, optimizers=optimizers)
    for each in pair:
        each.load_state_dict(saved)
    pair.train(compiled, steps=1, start=2, optimizers=optimizers)
    for each in pair:
        each.load_state_dict({key: value.clone() for key, value in saved.items()}, assign=True)
    pair.train(compiled, start=3)
    for each in pair:
        for parameter in each.parameters():
            parameter.data = parameter.data * 0.9
    pair.train(compiled, steps=1, start=6)
    pair.train(pair.model, steps=1, start=7)


@contextlib.contextmanager
def _shared_folder() -> Iterator[str]:
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    yield folder[0]
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)


@case("state")
def saved_by_dcp() -> None:
    pair = Pair.of()
    optimizers = pair.train(pair.compiled())
    with _shared_folder() as folder:
        model_state, optimizer_state = get_state_dict(pair.model, optimizers[0])
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        loaded = Pair(Pair.of().model, pair.reference)
        optimizer = adamw(loaded.model)
        model_state, optimizer_state = get_state_dict(loaded.model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(loaded.model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    loaded.train(loaded.compiled(), start=2, optimizers=(optimizer, optimizers[1]))
    full = get_model_state_dict(loaded.model, options=StateDictOptions(full_state_dict=True))
    weight = full["blocks.0.a.weight"]
    assert isinstance(weight, torch.Tensor)
    assert weight.shape == (2 * WIDTH, WIDTH)


@case("state")
def read_in_a_forward() -> None:
    class Reads(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            made = super().forward(tokens)
            return made + torch.stack([p.sum() for p in self.norm.parameters()]).sum()

    pair = Pair.of(Reads)
    pair.train(pair.compiled())
