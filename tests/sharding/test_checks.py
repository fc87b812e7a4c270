"""Parameters and modules that `fully_shard` leaves alone, and what it refuses before it touches anything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError, UnsupportedModelError, fully_shard, units
from tests.beside import close, compile_eagerly, loss_of
from tests.fake_world import fake_world
from tests.models.outlines import Small
from tests.ranks import run_ranks


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


def _ignored_module() -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    reference = copy.deepcopy(model)
    fully_shard(model, ignored_params=[model.kept])
    compiled = compile_eagerly(model)
    world, rank = dist.get_world_size(), dist.get_rank()
    batch = torch.randn(2 * world, 6)
    mine = batch.chunk(world)[rank]
    loss_of(compiled(mine)).backward()
    loss_of(reference(batch)).backward()
    local = copy.deepcopy(reference)
    local.zero_grad()
    loss_of(local(mine)).backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == (name not in KEPT), name
        assert parameter.grad is not None
        if isinstance(parameter.grad, DTensor):
            close(parameter.grad.full_tensor(), reference.get_parameter(name).grad, name)
        else:  # this rank's own, not reduced
            close(parameter.grad, local.get_parameter(name).grad, name)
    assert type(model.kept[1].running_mean) is torch.Tensor
    assert {slot.name for unit in units(model) for slot in unit.params}.isdisjoint(KEPT)


@pytest.mark.core
def test_an_ignored_module_keeps_its_parameters_and_their_own_gradients() -> None:
    run_ranks(_ignored_module)


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(4):
        yield


def _refusal(call: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value


@pytest.mark.usefixtures("world")
def test_ignored_modules_of_ignored_children_are_found_bottom_up() -> None:
    model = Mixed()
    fully_shard(model.up)
    fully_shard(model, ignored_params=[model.kept[1], model.get_parameter("tied.weight")])
    plain = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert plain == {"kept.0.weight", "kept.1.weight", "kept.1.bias"}


@pytest.mark.usefixtures("world")
def test_wrong_lists_of_what_to_ignore() -> None:
    model = Mixed()
    for listed, what in (("kept", "is 'kept'"), (3, "is 3"), (["kept.weight"], "contains 'kept.weight', a str")):
        error = _refusal(lambda: fully_shard(model, ignored_params=listed))  # type: ignore[arg-type]  # noqa: B023
        assert what in error.what
        assert error.where == "fully_shard(ignored_params=...)"
        assert "parameters and modules" in (error.instead or "")
    error = _refusal(lambda: fully_shard(model, ignored_params=[model]))
    assert "nothing is left" in error.what
    fully_shard(model.kept)
    error = _refusal(lambda: fully_shard(model, ignored_params=[model.kept]))
    assert "sharded already" in error.what
    assert "Sequential" in (error.where or "")


@pytest.mark.usefixtures("world")
def test_parameters_that_are_sharded_are_too_late_to_be_ignored() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    taken, kept = model[0][0].weight, [model[0][1].weight, model[1].weight]  # type: ignore[index]
    fully_shard(model[0], ignored_params=kept)  # as code for FSDP2 does: also what is in other parts, and each time
    for late in (taken, model.get_parameter("0.0.weight")):
        error = _refusal(lambda: fully_shard(model, ignored_params=[*kept, late]))  # noqa: B023
        assert "sharded already" in error.what
        assert error.where == "fully_shard(ignored_params=...), 0.0.weight"
    fully_shard(model, ignored_params=kept)
    assert {name for name, p in model.named_parameters() if not isinstance(p, DTensor)} == {"0.1.weight", "1.weight"}


@pytest.mark.usefixtures("world")
def test_gradients_from_before_are_refused_by_name() -> None:
    model = Small()
    loss_of(model(torch.ones(2, 6))).backward()
    error = _refusal(lambda: fully_shard(model))
    assert "gradient from before it was sharded" in error.what
    assert error.where == "scale"
    assert "zero_grad(set_to_none=True)" in (error.instead or "")
    assert not any(isinstance(p, DTensor) for p in model.parameters()), "nothing was touched"
    model.zero_grad()
    fully_shard(model)


@pytest.mark.usefixtures("world")
def test_parameters_on_several_kinds_of_device_are_refused() -> None:
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda:0")

    model = Small()
    model.scale = Elsewhere(torch.ones(()))
    error = _refusal(lambda: fully_shard(model))
    assert "scale on cuda:0, up.weight on cpu" in error.what
    assert "model.to(device)" in (error.instead or "")


@pytest.mark.usefixtures("world")
def test_a_submodule_that_is_replaced_after_sharding_is_noticed_without_compile_too() -> None:
    model = fully_shard(Small())
    model.down = nn.Linear(7, 3)
    error = _refusal(lambda: model(torch.ones(2, 6)))
    assert "added to a module after it was sharded" in error.what
    assert error.where == "down.weight"
    assert "ignored_params" in (error.instead or "")


def test_torchscript_is_refused_before_anything_changes() -> None:
    with fake_world(2):
        model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
        with pytest.raises(UnsupportedModelError, match="TorchScript reads the parameters") as caught:
            fully_shard(model)
        assert "where: 0" in str(caught.value)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        fully_shard(model, ignored_params=list(model.parameters()))


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sparse_gradients_are_refused_by_name(table: Callable[..., nn.Module], compiled: bool) -> None:  # noqa: FBT001
    with fake_world(2):
        model = fully_shard(table(8, 4, sparse=True))
        call = compile_eagerly(model) if compiled else model
        with pytest.raises((UnsupportedModelError, BackendCompilerFailed), match="gets a sparse gradient"):
            call(torch.ones(4, 3, dtype=torch.long)).sum().backward()
