"""Other orders of forward and backward than one after the other."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fully_shard
from tests.models.kinds import Slim
from tests.numerics.one_process.pair import batches, loss_of
from tests.ranks import run_ranks


def _pair() -> tuple[nn.Module, nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Slim()
    return model, torch.compile(model, backend="fsdp", options={"lower": "eager"}), copy.deepcopy(model)  # type: ignore[return-value]


def _worst_gradient(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)  # type: ignore[union-attr]


def _several_forwards_one_backward() -> float:
    model, compiled, reference = _pair()
    world, rank = dist.get_world_size(), dist.get_rank()
    data = batches(3, 4 * world)
    sum(loss_of(compiled(b.chunk(world)[rank])) for b in data).backward()  # type: ignore[union-attr]
    sum(loss_of(reference(b)) for b in data).backward()  # type: ignore[union-attr]
    return _worst_gradient(model, reference)


def test_several_forwards_before_one_backward() -> None:
    assert max(run_ranks(_several_forwards_one_backward)) < 1e-5


def _accumulated_backwards() -> float:
    model, compiled, reference = _pair()
    world, rank = dist.get_world_size(), dist.get_rank()
    for batch in batches(3, 4 * world):
        loss_of(compiled(batch.chunk(world)[rank])).backward()
        loss_of(reference(batch)).backward()
    return _worst_gradient(model, reference)


def test_gradients_of_several_backwards_add_up() -> None:
    assert max(run_ranks(_accumulated_backwards)) < 1e-5


def _retained_graph() -> float:
    model, compiled, reference = _pair()
    world, rank = dist.get_world_size(), dist.get_rank()
    (batch,) = batches(1, 4 * world)
    for loss in (loss_of(compiled(batch.chunk(world)[rank])), loss_of(reference(batch))):
        loss.backward(retain_graph=True)
        loss.backward()
    return _worst_gradient(model, reference)


def test_backward_twice_through_one_graph() -> None:
    assert max(run_ranks(_retained_graph)) < 1e-5


def _inference() -> tuple[float, float, bool]:
    model, compiled, reference = _pair()
    world, rank = dist.get_world_size(), dist.get_rank()
    first, second = batches(2, 4 * world)
    with torch.no_grad():
        before = (compiled(first.chunk(world)[rank]) - reference(first).chunk(world)[rank]).abs().max().item()
    loss_of(compiled(second.chunk(world)[rank])).backward()
    loss_of(reference(second)).backward()
    with torch.inference_mode():
        no_gradients = not compiled(first.chunk(world)[rank]).requires_grad
    return before, _worst_gradient(model, reference), no_gradients


def test_inference_before_and_after_training() -> None:
    for difference, gradient, no_gradients in run_ranks(_inference):
        assert difference < 1e-5
        assert gradient < 1e-5
        assert no_gradients


def _input_gradient(param_dtype: torch.dtype | None) -> float:
    torch.manual_seed(0)
    model = Slim()
    reference = copy.deepcopy(model)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype))
    compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
    world, rank = dist.get_world_size(), dist.get_rank()
    (batch,) = batches(1, 4 * world)
    mine = batch.chunk(world)[rank].clone().requires_grad_()
    theirs = batch.clone().requires_grad_()
    loss_of(compiled(mine)).backward()
    loss_of(reference(theirs)).backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    return ((mine.grad / world - theirs.grad.chunk(world)[rank]).abs().max() / theirs.grad.abs().max()).item()


@pytest.mark.parametrize(("param_dtype", "bound"), [(None, 1e-5), (torch.bfloat16, 1e-1)], ids=["stored", "cast"])
def test_gradient_of_the_input(param_dtype: torch.dtype | None, bound: float) -> None:
    assert max(run_ranks(_input_gradient, param_dtype)) < bound


def _forward_without_backward() -> float:
    model, compiled, reference = _pair()
    world, rank = dist.get_world_size(), dist.get_rank()
    first, second = batches(2, 4 * world)
    compiled(first.chunk(world)[rank])  # its graph is dropped
    loss_of(compiled(second.chunk(world)[rank])).backward()
    loss_of(reference(second)).backward()
    return _worst_gradient(model, reference)


def test_forward_without_its_backward() -> None:
    assert max(run_ranks(_forward_without_backward)) < 1e-5
