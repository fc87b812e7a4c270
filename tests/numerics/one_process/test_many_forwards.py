"""Other orders of forward and backward than one after the other."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fully_shard
from tests.models.kinds import Slim
from tests.numerics.one_process.measure import gradient_difference
from tests.ranks import on_ranks, run_ranks
from tests.two_sides import Run, WithOneProcess, loss_of, share


def _pair() -> WithOneProcess:
    return WithOneProcess(Slim, Run.PLAIN, shape=32, rows=4, twice=False)


@on_ranks()
def test_several_forwards_before_one_backward() -> None:
    pair = _pair()
    for losses in zip(*(pair.losses() for _ in range(3)), strict=True):
        torch.stack(losses).sum().backward()
    assert gradient_difference(*pair) < 1e-5


@on_ranks()
def test_gradients_of_several_backwards_add_up() -> None:
    pair = _pair()
    for _ in range(3):
        pair.backward()
    assert gradient_difference(*pair) < 1e-5


@on_ranks()
def test_backward_twice_through_one_graph() -> None:
    pair = _pair()
    for loss in pair.losses():
        loss.backward(retain_graph=True)
        loss.backward()
    assert gradient_difference(*pair) < 1e-5


@on_ranks()
def test_inference_before_and_after_training() -> None:
    pair = _pair()
    mine, whole = pair.next_batch()
    with torch.no_grad():
        before = (pair.call(mine) - share(pair.reference(whole))).abs().max().item()
    pair.backward()
    with torch.inference_mode():
        assert not pair.call(mine).requires_grad
    assert before < 1e-5
    assert gradient_difference(*pair) < 1e-5


def _input_gradient(param_dtype: torch.dtype | None) -> float:
    shard = functools.partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype))
    pair = WithOneProcess(Slim, shard=shard, shape=32, rows=4)
    mine, theirs = (batch.clone().requires_grad_() for batch in pair.next_batch())
    loss_of(pair.call(mine)).backward()
    loss_of(pair.reference(theirs)).backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    return ((mine.grad / dist.get_world_size() - share(theirs.grad)).abs().max() / theirs.grad.abs().max()).item()


@pytest.mark.parametrize(("param_dtype", "bound"), [(None, 1e-5), (torch.bfloat16, 1e-1)], ids=["stored", "cast"])
def test_gradient_of_the_input(param_dtype: torch.dtype | None, bound: float) -> None:
    assert max(run_ranks(_input_gradient, param_dtype)) < bound


@on_ranks()
def test_forward_without_its_backward() -> None:
    pair = _pair()
    pair.call(pair.next_batch()[0])  # its graph is dropped
    pair.backward()
    assert gradient_difference(*pair) < 1e-5
