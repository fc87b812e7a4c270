"""Gradients of inputs, one by one and in batches."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import UnsupportedModelError, fully_shard, step_in_backward
from tests.models.outlines import Small
from tests.ranks import on_ranks
from tests.two_sides import Run, WithOneProcess, loss_of, share

Model = Callable[[torch.Tensor], torch.Tensor]


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(2, 6)


def _batched(model: Model) -> torch.Tensor:
    x = _input().requires_grad_()
    output = model(x)
    several = torch.eye(output.numel()).reshape(-1, *output.shape)
    return torch.autograd.grad(output, x, several, is_grads_batched=True)[0]


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
