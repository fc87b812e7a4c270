"""Parameters that FSDP2 cannot split: whole on every rank, their gradients averaged with those of their unit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile._torch import fully_shard_calls as private
from fsdp_compile.sharding.fully_shard import fully_shard
from tests.ranks import on_ranks
from tests.sharding.models import Model, batch, made, world_batch
from tests.two_sides import mesh_of, share


def _scaled() -> Any:
    return made(lambda: Model(scale=True))


def _backward(model: nn.Module, tokens: torch.Tensor) -> None:
    model(tokens).square().mean().backward()


def _expected(steps: int = 1) -> torch.Tensor:
    model = _scaled()
    for step in range(steps):
        _backward(model, world_batch(step))
    return model.scale.grad


@on_ranks()
def test_they_stay_plain() -> None:
    model = fully_shard(_scaled())
    assert not any(isinstance(p, DTensor) for p in (model.scale, model.empty, model.count))
    assert isinstance(model.head.weight, DTensor)
    note = private.kept_with(model, "replicated")
    assert list(note.params()) == [model.scale, model.empty, model.count]
    assert private.kept_with(model.blocks[0], "replicated") is None


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@on_ranks(world_size=lambda mesh: 2 * len(mesh))
def test_gradients_wait_for_a_backward_that_reduces(mesh: tuple[int, ...]) -> None:
    model = fully_shard(_scaled(), mesh=mesh_of(mesh))
    model.set_requires_gradient_sync(False)
    _backward(model, batch(0))
    own = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(own, model.scale.grad)
    assert not torch.equal(own[0], own[1])
    model.set_requires_gradient_sync(True)
    _backward(model, batch(1))
    assert torch.allclose(model.scale.grad, _expected(2), atol=1e-6)


@pytest.mark.long
@on_ranks()
def test_the_divide_factor_of_the_unit_counts() -> None:
    model = fully_shard(_scaled())
    for part in (model.embed, *model.blocks, model.head, model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    _backward(model, batch(0))
    assert torch.allclose(model.scale.grad, _expected() * dist.get_world_size(), atol=1e-6)


class _Scales(nn.Module):
    """Replicated parameters in every block, and one that several modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for number, block in enumerate(self.blocks):
            block.scale = nn.Parameter(torch.tensor(1.0 + number))
        self.scale = self.blocks[0].scale
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            scale = block.scale
            assert isinstance(scale, torch.Tensor)
            x = torch.tanh(block(x)) * scale
        x = self.head(x)
        return x * self.scale  # type: ignore[operator]


@pytest.mark.parametrize("bottom_up", [False, True])
@on_ranks()
def test_one_message_per_backward(*, bottom_up: bool) -> None:
    model, alone = made(_Scales), made(_Scales)
    for block in model.blocks if bottom_up else ():
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(5)
    x = torch.randn(2 * dist.get_world_size(), 4)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as messages:
        model(share(x)).square().mean().backward()
    assert messages.call_count == 1
    alone(x).square().mean().backward()
    for mine, theirs in ((model, alone), *zip(model.blocks, alone.blocks, strict=True)):
        assert torch.allclose(mine.scale.grad, theirs.scale.grad, atol=1e-6)


@on_ranks()
def test_those_that_are_replaced_later_are_averaged_too() -> None:
    with torch.device("meta"):
        model = fully_shard(_scaled())
    model.to_empty(device="cpu")
    state = {name: value for name, value in _scaled().state_dict().items() if name in ("scale", "count", "empty")}
    model.load_state_dict(state, strict=False, assign=True)
    with torch.no_grad():
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                parameter.to_local().fill_(0.01 * (1 + dist.get_rank()))
    _backward(model, batch(0))
    grads = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(grads, model.scale.grad)
    assert torch.equal(*grads)
    assert bool(grads[0] != 0)


@on_ranks()
def test_a_frozen_one_may_be_trained_later() -> None:
    model = _scaled()
    model.scale.requires_grad = False
    fully_shard(model)
    assert not model.scale.requires_grad
    _backward(model, batch(0))
    assert getattr(model.scale, "grad") is None  # noqa: B009  mypy keeps it
    model.scale.requires_grad_()
    model.zero_grad()
    _backward(model, batch(0))
    assert torch.allclose(model.scale.grad, _expected(), atol=1e-6)


@pytest.mark.long
@on_ranks()
def test_after_a_backward_that_failed() -> None:
    model = fully_shard(_scaled())
    bad = model(batch(0)).square().mean() * 1
    bad.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bad.backward()
    model.reset_iter_state()
    model.zero_grad()
    _backward(model, batch(0))
    assert torch.allclose(model.scale.grad, _expected(), atol=1e-6)
