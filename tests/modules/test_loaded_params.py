"""Conversions that change nothing, assigned state dicts of tied models, state of other ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_compile import ConfigError, full_params, fully_shard
from tests import long
from tests.beside import Beside, Run
from tests.models.outlines import Odd
from tests.ranks import run_ranks

CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cpu": lambda model: model.cpu(),
    "to": lambda model: model.to("cpu"),
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
}


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6, bias=False)
        self.two = nn.Linear(6, 6, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu())


def _check_conversion(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = fully_shard(Odd())
    expected = {key: value.full_tensor().clone() for key, value in model.state_dict().items()}
    parameters = list(model.parameters())
    assert CONVERSIONS[name](model) is model
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saving: Any = dcp.async_save(state, checkpoint_id=folder)
    saving.result()
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(loaded, checkpoint_id=folder)
    found: list[dict[str, Any]] = [copy.deepcopy(state), torch.load(file, weights_only=False), loaded]
    for kept in found:
        for key, value in expected.items():
            assert torch.equal(kept[key].full_tensor(), value.to(kept[key].dtype)), key
    if name != "half":
        with torch.no_grad():
            parameters[0].add_(1)
        assert torch.equal(next(iter(state.values())).full_tensor(), next(iter(expected.values())) + 1), "one memory"


@long.parametrize("name", CONVERSIONS, always=["to", "half"])
def test_state_dicts_are_saved_between_a_conversion_and_the_next_forward(name: str, tmp_path: Path) -> None:
    run_ranks(_check_conversion, name, tmp_path)


def _check_training_goes_on(how: Run) -> None:
    pair = Beside(_mlp, how)
    pair.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    pair.step()
    pair.change(lambda model: model.cpu().float())
    pair.step()
    pair.change(lambda model: model.double())
    pair.step(dtype=torch.float64)


@long.parametrize("how", [Run.EAGER, Run.SHARDED], always=[Run.EAGER])
def test_training_goes_on_after_conversions(how: Run) -> None:
    run_ranks(_check_training_goes_on, how)


def _check_tie(*, on_meta: bool, names: list[str]) -> None:
    torch.manual_seed(0)
    reference = _Tied()
    with torch.device("meta" if on_meta else "cpu"):
        model = _Tied()
    fully_shard(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    values = reference.state_dict()
    given = {name: distribute_tensor(values[name], mesh, [Shard(0)]) for name in names}
    model.load_state_dict(given, assign=True, strict=len(names) == 2)
    assert model.one.weight is model.two.weight
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    batch = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for each in (model, reference):
        each(batch).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert len(list(model.parameters())) == 1
    weight: Any = model.one.weight
    torch.testing.assert_close(weight.full_tensor(), reference.one.weight)


@long.parametrize("on_meta", [True, False], always=[True])
@long.parametrize(
    "names",
    [["one.weight", "two.weight"], ["one.weight"], ["two.weight"]],
    always=[["one.weight", "two.weight"], ["two.weight"]],
)
def test_assigned_state_dicts_leave_parameters_tied(*, on_meta: bool, names: list[str]) -> None:
    run_ranks(_check_tie, on_meta=on_meta, names=names)


def _check_copied_from_another_mesh() -> None:
    model = fully_shard(_mlp())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.arange(42.0).view(7, 6)
    weight = model.get_parameter("0.weight")
    with torch.no_grad():
        weight.copy_(distribute_tensor(value, mesh))
    assert isinstance(weight, DTensor)
    assert torch.equal(weight.full_tensor(), value)


def test_a_distributed_tensor_of_a_mesh_without_names_is_copied() -> None:
    run_ranks(_check_copied_from_another_mesh)


def _check_assigned_from_another_mesh() -> None:
    torch.manual_seed(0)
    world = dist.get_world_size()
    named = init_device_mesh("cpu", (world,), mesh_dim_names=("split",))
    plain = init_device_mesh("cpu", (world,))
    model, reference = fully_shard(_mlp(), mesh=named), _mlp()
    values = reference.state_dict()
    model.load_state_dict({k: distribute_tensor(v, plain, [Shard(0)]) for k, v in values.items()}, assign=True)
    batch = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for each in (model, reference):
        each(batch).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert isinstance(mine.grad, DTensor)
        assert mine.device_mesh == mine.grad.device_mesh == named
        torch.testing.assert_close(mine.full_tensor(), theirs)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_assigned_tensors_of_a_mesh_with_other_names_become_the_models() -> None:
    run_ranks(_check_assigned_from_another_mesh)


def _check_state_of_another_rank() -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    box = [file.getvalue()]
    dist.broadcast_object_list(box, 0)
    state = torch.load(io.BytesIO(box[0]), weights_only=False)
    before = {key: value.full_tensor().clone() for key, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        model.load_state_dict(state)
    else:
        with pytest.raises(ConfigError, match="saved by another rank"):
            model.load_state_dict(state)
    for key, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), before[key]), key


def test_a_state_dict_that_rank_0_alone_has_saved_is_refused_on_others() -> None:
    run_ranks(_check_state_of_another_rank)


def _check_full_values() -> None:
    model = fully_shard(_mlp())
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    full = {name: torch.ones_like(value) for name, value in before.items()}
    with pytest.raises(ConfigError, match="holds full values") as raised:
        model.load_state_dict(full)
    assert "0.weight" in str(raised.value.where)
    assert "set_model_state_dict" in str(raised.value.instead)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), before[name], rtol=0, atol=0)
    with full_params(model):
        model.load_state_dict(full)
    for value in model.state_dict().values():
        assert bool((value.full_tensor() == 1).all())


def test_full_values_are_refused_where_shards_are_expected() -> None:
    run_ranks(_check_full_values)
