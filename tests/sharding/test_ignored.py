"""Parameters that are not sharded: what a call ignores, and what FSDP2 cannot split, whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard, materialize, units
from fsdp_compile._torch import fully_shard_calls as private
from tests import long
from tests.ranks import on_ranks
from tests.sharding.models import Model, batch, made, world_batch
from tests.two_sides import close, compile_eagerly, loss_of, mesh_of, share, whole


class Mixed(nn.Module):
    """Two layers to shard, and a module with a buffer and nested layers to ignore, one of them tied to its outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 3)
        self.kept = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7, momentum=None))
        self.tied = nn.Linear(6, 7)
        self.tied.weight = self.kept[0].weight  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)) + self.kept(x) + self.tied(x))


KEPT = ("kept.0.weight", "kept.0.bias", "kept.1.weight", "kept.1.bias")


@pytest.mark.core
@on_ranks()
def test_an_ignored_module_keeps_its_parameters_and_their_own_gradients() -> None:
    model, reference, local = (made(Mixed).eval() for _ in range(3))
    fully_shard(model, ignored_params=[model.kept])
    compiled = compile_eagerly(model)
    batch = torch.randn(2 * dist.get_world_size(), 6)
    for call, rows in ((compiled, share(batch)), (reference, batch), (local, share(batch))):
        loss_of(call(rows)).backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == (name not in KEPT), name
        other = local if name in KEPT else reference  # this rank's own, not reduced
        close(whole(parameter.grad), other.get_parameter(name).grad, name)
    assert type(model.kept[1].running_mean) is torch.Tensor
    names = {param.name for unit in units(model) for group in unit.groups for param in group.params}
    assert names == {name for name, _ in model.named_parameters()} - set(KEPT)


@on_ranks()
def test_those_of_a_model_that_is_not_compiled_stay_the_same_objects_and_are_not_averaged() -> None:
    model = made()
    kept = model.blocks[0].mlp[0].weight
    fully_shard(model, ignored_params=[model.blocks[1], kept])
    assert model.blocks[0].mlp[0].weight is kept
    assert not any(isinstance(p, DTensor) for p in model.blocks[1].parameters())
    model(batch(0)).square().mean().backward()
    grads = [torch.zeros_like(kept) for _ in range(dist.get_world_size())]
    dist.all_gather(grads, kept.grad)
    assert not torch.equal(*grads)


def test_ignored_modules_of_ignored_children_are_found_bottom_up(fake_world: Callable[..., Any]) -> None:
    with fake_world(4):
        model = Mixed()
        fully_shard(model.up)
        fully_shard(model, ignored_params=[model.kept[1], model.get_parameter("tied.weight")])
        plain = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
        assert plain == {"kept.0.weight", "kept.1.weight", "kept.1.bias"}


def test_wrong_lists_of_what_to_ignore(fake_world: Callable[..., Any]) -> None:
    with fake_world(4):
        model = Mixed()
        for listed, what in (("kept", "is 'kept'"), (3, "is 3"), (["kept.weight"], "contains 'kept.weight', a str")):
            with pytest.raises(ConfigError) as caught:
                fully_shard(model, ignored_params=listed)  # type: ignore[arg-type]
            assert what in caught.value.what
            assert caught.value.where == "fully_shard(ignored_params=...)"
            assert "parameters and modules" in (caught.value.instead or "")
        fully_shard(model.kept)
        with pytest.raises(ConfigError, match="sharded already") as caught:
            fully_shard(model, ignored_params=[model.kept])
        assert "Sequential" in (caught.value.where or "")


def test_what_a_call_ignores_may_be_anywhere_and_is_ignored_each_time(fake_world: Callable[..., Any]) -> None:
    with fake_world(4):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
        kept = [model[0][1].weight, model[1].weight]  # type: ignore[index]
        fully_shard(model[0], ignored_params=kept)
        fully_shard(model, ignored_params=kept)
        plain = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
        assert plain == {"0.1.weight", "1.weight"}


@pytest.mark.parametrize("is_compiled", [False, True])
@long.parametrize("way", ["materialize", "to_empty", "assign"], always=["materialize"])
@on_ranks()
def test_new_objects_of_ignored_parameters_are_ignored(way: str, *, is_compiled: bool) -> None:
    with torch.device("cpu" if way == "assign" else "meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, ignored_params=[model[1]])
    before = model[1].weight
    if way == "materialize":
        materialize(model)
    elif way == "to_empty":
        model.to_empty(device="cpu")
    else:
        model.load_state_dict({n: torch.ones_like(t) for n, t in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    assert model[1].weight is not before
    outer = nn.Sequential(model)
    fully_shard(outer)
    assert not isinstance(model[1].weight, DTensor), "nor sharded by a call on a module above"
    called = compile_eagerly(outer) if is_compiled else outer
    called(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in outer.parameters())


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(table: Callable[..., nn.Module], fake_world: Callable[..., Any]) -> None:
    with fake_world(2):
        model = fully_shard(table(8, 4, sparse=True))
        with pytest.raises(Exception, match="gets a sparse gradient"):
            compile_eagerly(model)(torch.ones(4, 3, dtype=torch.long)).sum().backward()


# What FSDP2 cannot split.


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
