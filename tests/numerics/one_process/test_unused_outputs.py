"""Outputs of a compiled model that the loss does not use: zeros where plain eager has None, as with torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from tests.beside import close, compile_eagerly, loss_of
from tests.ranks import run_ranks

Outputs = tuple[torch.Tensor, torch.Tensor | None]


class Heads(nn.Module):
    """A trunk and two heads, each of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, right: bool = True) -> Outputs:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden) if right else None


def _models() -> tuple[Heads, Heads, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Heads()
    batch = torch.randn(4, 6)
    return model, copy.deepcopy(model), batch, batch.chunk(2)[dist.get_rank()]


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }


def _compare(model: nn.Module, reference: nn.Module) -> None:
    expected = _gradients(reference)
    for name, gradient in _gradients(model).items():
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            close(gradient, expected[name], name)


def _unused() -> None:
    model, reference, batch, mine = _models()
    loss_of(compile_eagerly(model)(mine)[0]).backward()
    loss_of(torch.compile(reference, backend="aot_eager")(batch)[0]).backward()
    assert reference.right.weight.grad is not None
    assert not reference.right.weight.grad.any(), "torch.compile makes zeros"
    _compare(model, reference)


@pytest.mark.long
def test_a_head_whose_output_is_unused_has_zeros_as_with_torch_compile() -> None:
    run_ranks(_unused)


def _left_out() -> None:
    model, reference, batch, mine = _models()
    fsdp2 = copy.deepcopy(reference)
    torch_fully_shard(fsdp2)
    loss_of(compile_eagerly(model)(mine, right=False)[0]).backward()
    loss_of(fsdp2(mine)[0]).backward()
    loss_of(reference(batch)[0]).backward()
    assert reference.right.weight.grad is None
    _compare(model, reference)
    _compare(fsdp2, reference)
    not_compiled = fully_shard(copy.deepcopy(Heads()))
    loss_of(not_compiled(mine)[0]).backward()
    assert not_compiled.right.weight.grad is None


def test_a_head_that_the_forward_leaves_out_has_none_as_in_one_process() -> None:
    run_ranks(_left_out)


def _one_each() -> None:
    model, reference, batch, mine = _models()
    loss_of(compile_eagerly(model)(mine)[dist.get_rank()]).backward()
    left, right = reference(batch)
    ((loss_of(left[:2]) + loss_of(right[2:])) / 2).backward()
    _compare(model, reference)


@pytest.mark.long
def test_ranks_that_use_one_output_each_get_the_gradients_of_all() -> None:
    """Why a rank whose own loss leaves an output out must not have None: others have gradients for it."""
    run_ranks(_one_each)
