"""Full optimizer state of 0-d parameters, and optimizers of torch's own on shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_compile import flat_step, fully_shard
from tests import long
from tests.ranks import on_ranks


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def _pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = _Scaled()
    reference = copy.deepcopy(model)
    return fully_shard(model), reference


def _adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.05)


def _batch() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


def _train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(_batch()).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def _assert_equal(model: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        # What FSDP2 cannot split stays whole.
        assert isinstance(mine, DTensor) == bool(mine.dim()), name
        torch.testing.assert_close(mine.full_tensor() if isinstance(mine, DTensor) else mine, theirs, msg=name)


@long.parametrize("from_rank_0", [False, True], always=[True])
@on_ranks()
def test_a_full_dict_resumes_0_d_parameters(*, from_rank_0: bool) -> None:
    model, reference = _pair()
    optimizer, theirs = _adamw(model), _adamw(reference)
    for each, own in ((model, optimizer), (reference, theirs)):
        _train(each, own)
    options = StateDictOptions(full_state_dict=True, cpu_offload=from_rank_0)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    if from_rank_0:
        assert bool(full) == (dist.get_rank() == 0)
    resumed = _adamw(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_optimizer_state_dict(model, resumed, full, options=options)
    _train(model, resumed)
    _train(reference, theirs)
    _assert_equal(model, reference)
    state: Any = resumed.state[model.get_parameter("scale")]
    assert not any(isinstance(value, DTensor) for value in state.values())


_Make = Callable[[Any], optim.Optimizer]


RIGHT: dict[str, tuple[_Make, int]] = {
    "Rprop, flat": (lambda p: flat_step(optim.Rprop(p)), 7),
    "fused SGD, flat": (lambda p: flat_step(optim.SGD(p, lr=0.1, momentum=0.9, fused=True)), 7),
    "fused Adagrad, flat": (lambda p: flat_step(optim.Adagrad(p, fused=True)), 7),
    "fused AdamW": (lambda p: optim.AdamW(p, fused=True), 7),
    "ASGD": (optim.ASGD, 7),
}


def _mlp(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width, bias=False), nn.Tanh(), nn.Linear(width, 4, bias=False))


def _step_with_closure(model: nn.Module, optimizer: optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(_batch()).square().mean()
        loss.backward()
        return loss

    closure()
    optimizer.step()


@long.parametrize("name", RIGHT, always=["fused AdamW", "ASGD"])
@on_ranks()
def test_optimizers_equal_one_process(name: str) -> None:
    make, width = RIGHT[name]
    model, reference = fully_shard(_mlp(width)), _mlp(width)
    for each in (model, reference):
        optimizer = make(each.parameters())
        for _ in range(3):
            _step_with_closure(each, optimizer)
    _assert_equal(model, reference)


def _orthogonalized(gradient: torch.Tensor) -> torch.Tensor:
    """Muon's iterations in float64."""
    a, b, c = 3.4445, -4.775, 2.0315
    tall = gradient.size(0) > gradient.size(1)
    x = (gradient.T if tall else gradient).double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@on_ranks()
def test_muon_orthogonalizes_whole_matrices() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(32, 16)
    model = fully_shard(nn.Linear(16, 32, bias=False))
    weight: Any = model.weight
    weight.grad = torch.zeros_like(weight)
    own_rows = gradient.chunk(dist.get_world_size())[dist.get_rank()]
    weight.grad.to_local().copy_(own_rows)
    before = weight.full_tensor()
    optim.Muon(model.parameters(), lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    update = before - weight.full_tensor()
    expected = _orthogonalized(gradient) * 2**0.5  # its learning rate for 32 rows and 16 columns
    wrong = torch.cat([_orthogonalized(rows) for rows in gradient.chunk(dist.get_world_size())]) * 2**0.5
    error = (update - expected).norm() / expected.norm()
    assert error < 0.03, "it iterates in bfloat16"
    assert (wrong - expected).norm() / expected.norm() > 0.2, "each rank's rows by themselves would be seen"
