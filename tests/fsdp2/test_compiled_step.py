"""What runs around compiled graphs: compiled functions, pending gradients, modes and profilers, named errors."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

from fsdp_compile.backend import fsdp
from fsdp_compile.errors import RankFailedError, UnsupportedModelError
from fsdp_compile.lower.compiled_step import CompiledStep
from fsdp_compile.optim.step_in_backward import step_in_backward
from tests.models.kinds import WIDTH, Slim
from tests.ranks import on_ranks
from tests.two_sides import WithFsdp2, compile_eagerly, loss_of, made, shard_blocks, unique_graphs

EAGER: dict[str, Any] = {"lower": "eager"}


def _sharded() -> Any:
    return shard_blocks(made(Slim), fully_shard)


def _input(seed: int = 1) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def _pair() -> WithFsdp2:
    return WithFsdp2(Slim, functools.partial(shard_blocks, fully_shard=fully_shard), _input)


@on_ranks()
def test_a_compiled_function_follows_parameters_that_were_replaced() -> None:
    pair = _pair()
    function = compile_eagerly(lambda x: loss_of(pair.model(x)), fullgraph=True)
    for step in range(4):
        pair.zero_grad()
        for each in pair:
            if step == 1:
                each.load_state_dict({k: v.clone() * 2 for k, v in each.state_dict().items()}, assign=True)
            if step == 2:
                each.head.weight.requires_grad_(requires_grad=False)
        pair.accumulate(loss=lambda call, x: function(x) if call is pair.model else loss_of(call(x)))


@on_ranks()
def test_a_compiled_function_whose_parameters_are_trained_later_says_so() -> None:
    model = _sharded().requires_grad_(requires_grad=False)
    x = _input().requires_grad_()
    function = compile_eagerly(lambda x: loss_of(model(x)), fullgraph=True)
    function(x).backward()
    model.requires_grad_()
    with pytest.raises(UnsupportedModelError, match="all frozen"):
        function(x)
    function(x).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.long
@on_ranks()
def test_gradients_of_inputs_leave_pending_gradients_where_they_are() -> None:
    pair = _pair()
    compiled = pair.compiled(fullgraph=False)
    for _ in range(2):
        x = _input(2).requires_grad_()
        pair.zero_grad()
        pair.change(lambda model: model.set_requires_gradient_sync(False))
        pair.backward()
        # FSDP2 itself reduces what is left, whatever was asked for.
        pair.model.set_requires_gradient_sync(True)
        torch.autograd.grad(loss_of(compiled(x)), x)
        assert all(p.grad is None for p in pair.model.parameters())
        loss_of(compiled(x)).backward(inputs=[x])
        assert all(p.grad is None for p in pair.model.parameters())
        pair.reference.set_requires_gradient_sync(True)
        pair.accumulate()


def _fail(*_: object) -> None:
    raise ValueError("expected")


@pytest.mark.long
@on_ranks()
def test_a_compiled_function_follows_parameters_after_a_call_that_raised() -> None:
    """Before it all units have followed their parameters, and none has run since."""

    def shard(model: Any) -> Any:
        for part in model:
            fully_shard(part)
        return fully_shard(model)

    pair = WithFsdp2(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))), shard, _input)
    compiled = compile_eagerly(pair.model)
    function = compile_eagerly(lambda x: loss_of(pair.model(x)))

    def loss(call: Any, x: torch.Tensor) -> torch.Tensor:
        return function(x) if call is pair.model else loss_of(call(x))

    pair.accumulate(loss=loss)
    pair.accumulate(compiled)
    with compiled.register_forward_pre_hook(_fail), pytest.raises(ValueError, match="expected"):
        compiled(_input())
    for each in pair:
        each.load_state_dict({k: v.clone() * 2 for k, v in each.state_dict().items()}, assign=True)
    pair.zero_grad()
    pair.accumulate(loss=loss)


@on_ranks()
def test_a_compiled_function_does_not_go_on_with_the_parameters_before_a_conversion() -> None:
    model, tokens = _sharded(), torch.randint(0, 4, (2, 3), generator=torch.Generator().manual_seed(0))
    embedding = torch.nn.functional.one_hot(tokens, WIDTH)

    @torch.compile(backend=fsdp, options=EAGER)
    def call(x: torch.Tensor) -> torch.Tensor:
        return model(x.to(next(iter(model.parameters())).dtype))

    assert call(embedding).dtype is torch.float32
    model.bfloat16()
    with pytest.raises(UnsupportedModelError, match="parameters were converted since the last call"):
        call(embedding)
    model(embedding.bfloat16())
    loss_of(call(embedding)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


@on_ranks()
def test_a_collective_that_fails_names_the_units() -> None:
    def fail(args: list[Any]) -> None:
        raise dist.DistNetworkError("connection closed by peer")

    around, says = CompiledStep.around, r"in a compiled forward of unit blocks\.0, blocks\.1, \(root\)"
    with (
        mock.patch.object(CompiledStep, "around", lambda step, _: around(step, fail)),
        pytest.raises(RankFailedError, match=says),
    ):
        compile_eagerly(_sharded())(_input())


@on_ranks()
def test_it_is_plain_data() -> None:
    seen, of = [], CompiledStep.of

    def note(*args: Any) -> CompiledStep:
        seen.append(of(*args))
        return seen[-1]

    with mock.patch.object(CompiledStep, "of", note):
        loss_of(compile_eagerly(_sharded())(_input())).backward()
    assert len(seen) == 2
    assert [pickle.loads(pickle.dumps(step)) for step in seen] == seen
    assert dataclasses.is_dataclass(CompiledStep)


def _graphs(backend: Any, options: dict[str, Any]) -> int:
    """Graphs of a script that accumulates, evaluates, and has batches of five shapes."""
    torch.compiler.reset()
    counters.clear()
    model: Any = _sharded() if options else Slim()
    call = torch.compile(model, backend=backend, options=options, fullgraph=True)
    shapes = ((4, 8), (4, 6), (3, 7), (1, 5), (4, 9))
    for rows, length in shapes:
        x = torch.randn(rows, length, WIDTH)
        for last in (False, False, True):
            if options:
                model.set_requires_gradient_sync(last)
            loss_of(call(x)).backward()
        model.zero_grad()
        with torch.no_grad():
            call(x[:1])
    return unique_graphs()


@on_ranks()
def test_accumulation_adds_at_most_one_graph_for_each_shape_and_no_frame_reaches_the_recompile_limit() -> None:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        ours, plain = _graphs(fsdp, EAGER), _graphs("eager", {})
    assert plain < ours <= 2 * plain


@pytest.mark.long
@on_ranks()
def test_models_of_one_class_share_a_graph_as_without_sharding() -> None:
    counts = []
    forms: list[Callable[[nn.Module], Any]] = [lambda model: model, fully_shard]
    for form in forms:
        torch.compiler.reset()
        counters.clear()
        for _ in range(4):
            call = compile_eagerly(form(Slim()))
            for step in range(2):
                loss_of(call(_input(step))).backward()
        counts.append(unique_graphs())
    assert counts == [1, 1]


@on_ranks()
def test_an_optimizer_that_updates_in_backward_may_be_made_before_the_plain_model_is_sharded() -> None:
    ends = []
    for in_backward in (True, False):
        torch.manual_seed(0)
        model = Slim()
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        if in_backward:
            step_in_backward(optimizer)
        call = compile_eagerly(model)
        for step in range(3):
            loss_of(call(_input(step))).backward()
            assert not in_backward or all(p.grad is None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.full_tensor().flatten() for p in model.parameters()]))  # type: ignore[attr-defined]
    one, other = ends
    assert torch.equal(one, other)
