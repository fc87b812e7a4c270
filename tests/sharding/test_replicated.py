"""Parameters that FSDP2 cannot split: whole on every rank, their gradients averaged with those of their unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_compile._torch import fully_shard_calls as private
from fsdp_compile.sharding.fully_shard import fully_shard
from tests.ranks import on_ranks, run_ranks
from tests.sharding.models import Model, batch, made, world_batch


def _scaled() -> Any:
    return made(lambda: Model(scale=True))


def _backward(model: nn.Module, tokens: torch.Tensor) -> None:
    model(tokens).square().mean().backward()


def _expected(steps: int = 1) -> torch.Tensor:
    model = _scaled()
    for step in range(steps):
        _backward(model, world_batch(step))
    gradient: torch.Tensor = model.scale.grad
    return gradient


@on_ranks()
def test_they_stay_plain() -> None:
    model = fully_shard(_scaled())
    assert [isinstance(p, DTensor) for p in (model.scale, model.empty, model.count, model.head.weight)] == [
        False,
        False,
        False,
        True,
    ]


def _no_sync(mesh: tuple[int, ...]) -> bool:
    names = ("replicas", "shards")[2 - len(mesh) :]
    model = fully_shard(_scaled(), mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    model.set_requires_gradient_sync(False)
    _backward(model, batch(0))
    own = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(own, model.scale.grad)
    assert not torch.equal(own[0], own[1])
    model.set_requires_gradient_sync(True)
    _backward(model, batch(1))
    return torch.allclose(model.scale.grad, _expected(2), atol=1e-6)


def test_gradients_wait_for_a_backward_that_reduces() -> None:
    assert run_ranks(_no_sync, (2,)) == [True] * 2
    assert run_ranks(_no_sync, (2, 2), world_size=4) == [True] * 4


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


class _Messages:
    """Counts calls of `all_reduce`."""

    def __init__(self) -> None:
        self.count, self._run = 0, dist.all_reduce

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._run(*args, **kwargs)


def _one_message(*, bottom_up: bool) -> tuple[bool, int]:
    model, alone = made(_Scales), made(_Scales)
    for block in model.blocks if bottom_up else ():
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(5)
    x = torch.randn(2 * dist.get_world_size(), 4)
    messages = _Messages()
    dist.all_reduce = messages
    try:
        model(x[2 * dist.get_rank() :][:2]).square().mean().backward()
    finally:
        dist.all_reduce = messages._run
    alone(x).square().mean().backward()
    pairs = [(model.scale, alone.scale), *((a.scale, b.scale) for a, b in zip(model.blocks, alone.blocks, strict=True))]
    return all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs), messages.count


def test_one_message_per_backward() -> None:
    assert run_ranks(_one_message, bottom_up=False) == [(True, 1)] * 2
    assert run_ranks(_one_message, bottom_up=True) == [(True, 1)] * 2


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


def _gradient(model: Any) -> Any:
    return model.scale.grad


@on_ranks()
def test_a_frozen_one_may_be_trained_later() -> None:
    model = _scaled()
    model.scale.requires_grad = False
    fully_shard(model)
    assert not model.scale.requires_grad
    _backward(model, batch(0))
    assert _gradient(model) is None
    model.scale.requires_grad_()
    model.zero_grad()
    _backward(model, batch(0))
    assert torch.allclose(model.scale.grad, _expected(), atol=1e-6)


@pytest.mark.long
@on_ranks()
def test_after_a_backward_that_failed() -> None:
    model = fully_shard(_scaled())
    loss = model(batch(0)).square().mean()
    handle = model.embed.weight  # not reached: the hook of an activation fails first
    handle.requires_grad_()
    bad = loss * 1
    bad.register_hook(lambda _: 1 / 0)
    try:
        bad.backward()
    except ZeroDivisionError:
        model.reset_iter_state()
    model.zero_grad()
    _backward(model, batch(0))
    assert torch.allclose(model.scale.grad, _expected(), atol=1e-6)


@on_ranks()
def test_the_call_knows_them() -> None:
    model = fully_shard(_scaled())
    note = private.kept_with(model, "replicated")
    assert list(note.params()) == [model.scale, model.empty, model.count]
    assert private.kept_with(model.blocks[0], "replicated") is None
