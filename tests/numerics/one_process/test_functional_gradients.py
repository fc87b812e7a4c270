"""Gradients that are asked for by functions: `torch.func`, `torch.autograd.functional`, and `backward(inputs=...)`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.autograd import functional
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import UnsupportedModelError, fully_shard, step_in_backward
from tests.models.outlines import Small
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, close, loss_of, share

Model = Callable[[torch.Tensor], torch.Tensor]
HOW: Final = pytest.mark.parametrize("how", [Run.PLAIN, Run.SHARDED], ids=lambda how: how.value)


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(2, 6)


def _output_of(model: Model) -> torch.Tensor:
    return model(_input()).detach()


def _vjp(model: Model) -> torch.Tensor:
    result: torch.Tensor = torch.func.vjp(model, _input())[1](torch.ones_like(_output_of(model)))[0]
    return result


def _loss_by_input(model: Model) -> torch.Tensor:
    result: torch.Tensor = torch.func.grad(lambda x: loss_of(model(x)))(_input())
    return result


def _by_inputs_alone(model: Model) -> torch.Tensor:
    x = _input().requires_grad_()
    loss_of(model(x)).backward(inputs=[x])
    assert x.grad is not None
    return x.grad


def _batched(model: Model) -> torch.Tensor:
    x = _input().requires_grad_()
    output = model(x)
    several = torch.eye(output.numel()).reshape(-1, *output.shape)
    return torch.autograd.grad(output, x, several, is_grads_batched=True)[0]


def _vectorized(model: Model) -> torch.Tensor:
    result: torch.Tensor = functional.jacobian(model, _input(), vectorize=True)
    return result


def _jacobian(model: Model) -> torch.Tensor:
    result: torch.Tensor = functional.jacobian(model, _input())
    return result


def _hvp(model: Model) -> torch.Tensor:
    function: Any = functional.hvp
    result: torch.Tensor = function(lambda x: loss_of(model(x)), _input(), torch.ones(2, 6))[1]
    return result


def _jacrev(model: Model) -> torch.Tensor:
    result: torch.Tensor = torch.func.jacrev(model)(_input())
    return result


@HOW
@on_ranks()
def test_gradients_by_inputs_are_those_of_one_process(how: Run) -> None:
    pair = WithOneProcess(Small, how)
    pair.call(_input())
    always = (_jacrev, _vjp, _loss_by_input, _jacobian, _by_inputs_alone, _batched, _vectorized)
    for function in always:
        close(function(pair.call), function(pair.reference), function.__name__)
    assert [name for model in pair for name, p in model.named_parameters() if p.grad is not None] == []


@pytest.mark.long
@on_ranks()
def test_compiled_backwards_refuse_gradients_of_gradients() -> None:
    pair = WithOneProcess(Small, Run.PLAIN)
    pair.call(_input())
    plain: Any = torch.compile(copy.deepcopy(pair.reference), backend="aot_eager")
    for model in (pair.call, plain):
        with pytest.raises(RuntimeError, match=r"double backward|create_graph=False"):
            _hvp(model)
    pair.backward()
    pair.compare()


@pytest.mark.long
@on_ranks()
def test_batches_of_gradients_are_refused_where_backward_updates() -> None:
    pair = WithOneProcess(Small, Run.SHARDED)
    step_in_backward(torch.optim.SGD(pair.model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedModelError, match=r"(?s)collectives take one.*step_in_backward.*jacrev"):
        _batched(pair.call)
    for mine, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
        # What FSDP2 cannot split stays whole.
        assert torch.equal(mine.full_tensor() if isinstance(mine, DTensor) else mine, theirs)


@HOW
@on_ranks()
def test_some_gradients_alone_are_those_of_a_backward_that_drops_the_others(how: Run) -> None:
    """What docs/limits.md says to write in the place of `backward(inputs=parameters)`."""
    pair = WithOneProcess(Small, how)
    pair.backward()
    pair.change(lambda model: model.zero_grad())
    wanted = [p for name, p in pair.reference.named_parameters() if name.startswith("up.")]
    loss_of(pair.reference(_input())).backward(inputs=wanted)
    loss_of(pair.call(_input())).backward()
    for name, parameter in pair.model.named_parameters():
        if not name.startswith("up."):
            parameter.grad = None
    pair.compare()


@pytest.mark.parametrize(("param_dtype", "bound"), [(None, 1e-5), (torch.bfloat16, 1e-1)], ids=["stored", "cast"])
@on_ranks()
def test_gradient_of_the_input(param_dtype: torch.dtype | None, bound: float) -> None:
    shard = functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype))
    pair = WithOneProcess(Small, shard=shard, rows=4)
    mine, theirs = (batch.clone().requires_grad_() for batch in pair.next_batch())
    loss_of(pair.call(mine)).backward()
    loss_of(pair.reference(theirs)).backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    difference = (mine.grad / dist.get_world_size() - share(theirs.grad)).abs().max()
    assert difference / theirs.grad.abs().max() < bound
