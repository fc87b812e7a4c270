"""`gc.freeze()` before the first step hides objects from searches of the heap: nothing here may depend on one."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import fully_shard
from tests.fake_world import fake_world


class _Recurrent(nn.Module):
    """Dynamo leaves its forward to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


@pytest.fixture
def _frozen_later() -> object:
    yield
    gc.unfreeze()


def _stepped(*, freeze: bool) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    with fake_world(1):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()  # state of plain parameters, which has to follow them
        optimizer.zero_grad()
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        if freeze:
            gc.freeze()
        for _ in range(2):
            compiled(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        followed = sum(
            held is own for held, own in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
        )
        return [parameter.to_local().clone() for parameter in model.parameters()], followed  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_frozen_later")
def test_an_optimizer_from_before_follows_its_parameters() -> None:
    (plain, followed), (frozen, followed_frozen) = _stepped(freeze=False), _stepped(freeze=True)
    assert followed == followed_frozen == 4
    for ours, theirs in zip(frozen, plain, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("_frozen_later")
def test_a_model_whose_forward_dynamo_leaves_to_python_is_found() -> None:
    with fake_world(2):
        model = _Recurrent()
        compiled = torch.compile(model, backend="fsdp", options={"lower": "eager"})
        gc.freeze()
        compiled(torch.ones(2, 3, 4)).sum().backward()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_hooks_on_all_optimizers_come_with_the_first_sharded_model() -> None:
    with fake_world(2):
        model = fully_shard(nn.Linear(2, 2))
        old = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([*model.parameters(), old], lr=0.1)
        old.grad = torch.ones(2)
        optimizer.step()  # of sharded parameters without gradients and a plain one with
        assert torch.equal(old, torch.full((2,), 0.9))
