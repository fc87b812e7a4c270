"""Parameters and modules that `fully_shard` leaves alone, also where they get other objects later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, fully_shard, materialize, units
from tests import long
from tests.ranks import on_ranks
from tests.two_sides import close, compile_eagerly, loss_of, made, share, whole


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
